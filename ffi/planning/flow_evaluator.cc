#include "ffi/planning/flow_evaluator.h"

#include <limits>
#include <utility>

namespace moe_lb {

template <size_t W>
FlowEvaluator<W>::FlowEvaluator(View<const int32_t> tokens, size_t num_ranks, size_t slots)
    // Reserve as many removed replicas as a placement can have, so that Compact runs once in that many swaps.
    : capacity_(tokens.size() + 2 * num_ranks * slots), now_(tokens, num_ranks), trial_(now_) {
  int64_t total = 0;
  for (const int32_t some : tokens) total += some;
  const auto ranks = static_cast<int64_t>(num_ranks);
  mean_ = static_cast<int32_t>((total + ranks - 1) / ranks);
  FindCut();
}

template <size_t W>
void FlowEvaluator<W>::Apply(const Swap& swap) {
  // Start from the flow of the previous placement, which differs by one swap, so that few tokens must be pushed.
  trial_ = now_;
  if (swap.dropped != Swap::kNoExpert) trial_.Remove(trial_.Find(swap.dropped, swap.rank));
  trial_.Add(swap.added, swap.rank, 0);
}

template <size_t W>
bool FlowEvaluator<W>::Keeps(const Swap& swap, int32_t threshold) {
  Apply(swap);
  RankSet<W> stuck;
  // Stop at the threshold, because most swaps are refused.
  return Offload(trial_, threshold, &stuck) <= threshold;
}

// A rank that cannot be offloaded keeps its load above the limit, and the sum of these is the largest excess. No path
// leads out of the ranks that it reaches, so later paths avoid them, and those above the limit are stuck, too.
template <size_t W>
int64_t FlowEvaluator<W>::Offload(Serving& serving, int64_t enough, RankSet<W>* stuck) const {
  int64_t excess = 0;
  for (uint32_t rank = 0; rank < serving.num_ranks() && excess <= enough; ++rank) {
    if (serving.load(rank) <= limit_) continue;
    if (!stuck->Has(rank)) {
      if (serving.OffloadRank(rank, limit_)) continue;
      for (const uint32_t reached : serving.reached()) stuck->Add(reached);
    }
    excess += serving.load(rank) - limit_;
  }
  return excess;
}

template <size_t W>
void FlowEvaluator<W>::Commit(const Swap& swap) {
  Apply(swap);
  std::swap(now_, trial_);
  // Removed replicas leave their entries behind, and every copy of `now_` includes them.
  if (now_.num_entries() >= capacity_) Compact();
  FindCut();
}

template <size_t W>
void FlowEvaluator<W>::Place(uint32_t expert, uint32_t rank) {
  now_.Add(expert, rank, 0);
}

template <size_t W>
void FlowEvaluator<W>::Compact() {
  trial_.Reset();
  for (auto entry = static_cast<uint32_t>(now_.num_experts()); entry < now_.num_entries(); ++entry) {
    if (!now_.removed(entry)) trial_.Add(now_.expert(entry), now_.rank(entry), now_.tokens(entry));
  }
  std::swap(now_, trial_);
}

template <size_t W>
void FlowEvaluator<W>::SetLimit(int32_t limit) {
  limit_ = limit;
  FindCut();
}

template <size_t W>
int32_t FlowEvaluator<W>::MaxLoad() {
  trial_ = now_;
  return trial_.Level(mean_);
}

// The cut consists of the ranks that cannot be offloaded and of all ranks they reach; tokens cannot leave the cut.
template <size_t W>
void FlowEvaluator<W>::FindCut() {
  RankSet<W> stuck;
  worst_ = static_cast<int32_t>(Offload(now_, std::numeric_limits<int64_t>::max(), &stuck));
  if (worst_ > 0) cut_ = stuck;
}

template class FlowEvaluator<1>;
template class FlowEvaluator<2>;
template class FlowEvaluator<4>;
template class FlowEvaluator<16>;

}  // namespace moe_lb
