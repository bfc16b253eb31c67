#include "ffi/planning/flow_evaluator.h"

#include <algorithm>

namespace moe_lb {

FlowEvaluator::FlowEvaluator(View<const int32_t> tokens, size_t num_ranks, size_t slots)
    // Reserve as many removed replicas as a placement can have, so that Compact runs once in that many swaps.
    : capacity_(tokens.size() + 2 * num_ranks * slots), now_(tokens, num_ranks), trial_(now_) {
  int64_t total = 0;
  for (const int32_t some : tokens) total += some;
  const auto ranks = static_cast<int64_t>(num_ranks);
  mean_ = static_cast<int32_t>((total + ranks - 1) / ranks);
  FindCut();
}

void FlowEvaluator::Apply(const Swap& swap) {
  // Start from the flow of the previous placement, which differs by one swap, so that few tokens must be pushed.
  trial_ = now_;
  if (swap.dropped != Swap::kNoExpert) trial_.Remove(trial_.Find(swap.dropped, swap.rank));
  trial_.Add(swap.added, swap.rank, 0);
}

bool FlowEvaluator::Keeps(const Swap& swap, int32_t threshold) {
  Apply(swap);
  int64_t stuck = 0;
  // A rank that cannot be offloaded keeps its load above the limit, and the sum of these is the largest excess. Stop at
  // the threshold, because most swaps are refused.
  for (uint32_t rank = 0; rank < trial_.num_ranks() && stuck <= threshold; ++rank) {
    if (!trial_.OffloadRank(rank, limit_)) stuck += trial_.load(rank) - limit_;
  }
  return stuck <= threshold;
}

void FlowEvaluator::Commit(const Swap& swap) {
  Apply(swap);
  std::swap(now_, trial_);
  // Removed replicas leave their entries behind, and every copy of `now_` includes them.
  if (now_.num_entries() >= capacity_) Compact();
  FindCut();
}

void FlowEvaluator::Compact() {
  trial_.Reset();
  for (auto entry = static_cast<uint32_t>(now_.num_experts()); entry < now_.num_entries(); ++entry) {
    if (!now_.removed(entry)) trial_.Add(now_.expert(entry), now_.rank(entry), now_.tokens(entry));
  }
  std::swap(now_, trial_);
}

void FlowEvaluator::SetLimit(int32_t limit) {
  limit_ = limit;
  FindCut();
}

int32_t FlowEvaluator::MaxLoad() {
  trial_ = now_;
  return trial_.Level(mean_);
}

// The cut consists of the ranks that cannot be offloaded and of all ranks they reach; tokens cannot leave the cut.
// Offloading one rank changes the flow of others, so compute the cut after all are offloaded as far as possible.
void FlowEvaluator::FindCut() {
  int64_t stuck = 0;
  for (uint32_t rank = 0; rank < now_.num_ranks(); ++rank) {
    if (!now_.OffloadRank(rank, limit_)) stuck += now_.load(rank) - limit_;
  }
  worst_ = static_cast<int32_t>(stuck);
  if (stuck == 0) return;
  cut_ = 0;
  for (uint32_t rank = 0; rank < now_.num_ranks(); ++rank) {
    if (now_.load(rank) <= limit_) continue;
    now_.OffloadRank(rank, limit_);
    for (const uint32_t reached : now_.reached()) cut_ |= Bit(reached);
  }
}

}  // namespace moe_lb
