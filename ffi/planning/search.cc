#include "ffi/planning/search.h"

#include <algorithm>

namespace moe_lb {

template <size_t W>
Search<W>::Search(View<const int32_t> tokens, size_t num_ranks, size_t slots, size_t fan_out,
                  SwapEvaluator<W>& evaluator)
    : home_experts_(tokens.size() / num_ranks),
      slots_(slots),
      fan_out_(fan_out),
      tokens_(tokens),
      evaluator_(evaluator),
      slot_(num_ranks * slots, Swap::kNoExpert),
      sent_(num_ranks, 0) {
  for (uint32_t expert = 0; expert < tokens.size(); ++expert) {
    by_tokens_.push_back(expert);
    holders_.emplace_back();
    holders_.back().Add(HomeOf(expert));
  }
  for (size_t first = 0; first < tokens.size(); first += home_experts_) {
    const auto begin = by_tokens_.begin() + static_cast<std::ptrdiff_t>(first);
    std::stable_sort(begin, begin + static_cast<std::ptrdiff_t>(home_experts_),
                     [&](uint32_t a, uint32_t b) { return tokens[a] > tokens[b]; });
  }
  for (const uint32_t expert : by_tokens_) hot_tokens_.push_back(tokens[expert]);
}

template <size_t W>
const std::vector<Replica>& Search<W>::Run(const std::vector<Replica>& start, int32_t enough, Effort effort) {
  Start(start);
  KeepBest();
  FindSides();
  const int64_t top = best_ / effort.margin;
  const auto steps = static_cast<int64_t>(effort.steps);
  for (int64_t left = steps; left > 0 && best_ > enough && !outside_.empty(); --left) {
    // Integer arithmetic makes the plan equal on every machine.
    const auto level = static_cast<int32_t>(top * left / steps * left / steps);
    if (!Propose() || !evaluator_.Keeps(swap_, std::max(level, evaluator_.worst()))) continue;
    Apply();
    if (evaluator_.worst() == 0) KeepBest();
    FindSides();
  }
  return best_replicas_;
}

template <size_t W>
void Search<W>::Start(const std::vector<Replica>& start) {
  for (const Replica& replica : start) {
    swap_slot_ = replica.rank * slots_;
    while (slot_[swap_slot_] != Swap::kNoExpert) ++swap_slot_;
    swap_ = {replica.rank, Swap::kNoExpert, replica.expert};
    evaluator_.Place(replica.expert, replica.rank);
    Record();
  }
}

template <size_t W>
void Search<W>::KeepBest() {
  best_ = evaluator_.MaxLoad();
  // From now on only a placement better by at least one token has no excess.
  evaluator_.SetLimit(best_ - 1);
  best_replicas_.clear();
  for (size_t slot = 0; slot < slot_.size(); ++slot) {
    if (slot_[slot] != Swap::kNoExpert) best_replicas_.push_back({slot_[slot], static_cast<uint32_t>(slot / slots_)});
  }
}

template <size_t W>
uint32_t Search<W>::Draw(uint32_t count) {
  // A linear congruential generator: its low bits have short periods, so only the upper half is used, scaled to the
  // range. Written out here because the standard's distributions differ between libraries.
  random_ = random_ * 6364136223846793005u + 1442695040888963407u;
  return static_cast<uint32_t>(((random_ >> 32) * count) >> 32);
}

template <size_t W>
uint32_t Search<W>::DrawRank(const std::vector<uint32_t>& ranks) {
  return ranks[Draw(static_cast<uint32_t>(ranks.size()))];
}

// Collects the ranks on both sides of the evaluator's cut.
template <size_t W>
void Search<W>::FindSides() {
  inside_.clear();
  outside_.clear();
  for (uint32_t rank = 0; rank < sent_.size(); ++rank) {
    (evaluator_.cut().Has(rank) ? inside_ : outside_).push_back(rank);
  }
}

template <size_t W>
bool Search<W>::Propose() {
  // Only a slot outside of the cut reduces the excess: it falls by the tokens of the expert added there.
  swap_.rank = DrawRank(outside_);
  const auto begin = slot_.begin() + static_cast<std::ptrdiff_t>(swap_.rank * slots_);
  const auto end = begin + static_cast<std::ptrdiff_t>(slots_);
  auto slot = std::find(begin, end, Swap::kNoExpert);
  if (slot == end) slot = begin + Draw(static_cast<uint32_t>(slots_));
  swap_slot_ = static_cast<size_t>(slot - slot_.begin());
  swap_.dropped = *slot;
  int32_t falls_back = 0;
  // If no other rank outside the cut holds the dropped expert, its tokens return to the cut, and the new expert must
  // have more.
  if (*slot != Swap::kNoExpert) {
    RankSet<W> others = holders_[*slot];
    others.Drop(swap_.rank);
    if (others.IsInside(evaluator_.cut())) falls_back = tokens_[*slot];
  }
  swap_.added = DrawExpert(falls_back);
  if (swap_.added == Swap::kNoExpert) return false;
  const uint32_t home = HomeOf(swap_.added);
  return sent_[home] < fan_out_ || (*slot != Swap::kNoExpert && HomeOf(*slot) == home);
}

// Returns an expert with more than `more_than` tokens, held only by ranks of the cut; kNoExpert after three failed
// draws. The number of draws bounds the time of a search.
template <size_t W>
uint32_t Search<W>::DrawExpert(int32_t more_than) {
  for (int draw = 0; draw < 3; ++draw) {
    const size_t first = DrawRank(inside_) * home_experts_;
    // Experts are sorted by tokens, so those with more come first. Count them without leaving the loop early, which the
    // compiler vectorizes.
    uint32_t hotter = 0;
    for (size_t i = first; i < first + home_experts_; ++i) hotter += hot_tokens_[i] > more_than ? 1u : 0u;
    if (hotter == 0) continue;
    const uint32_t expert = by_tokens_[first + Draw(hotter)];
    if (holders_[expert].IsInside(evaluator_.cut())) return expert;
  }
  return Swap::kNoExpert;
}

template <size_t W>
void Search<W>::Apply() {
  evaluator_.Commit(swap_);
  Record();
}

template <size_t W>
void Search<W>::Record() {
  slot_[swap_slot_] = swap_.added;
  if (swap_.dropped != Swap::kNoExpert) {
    holders_[swap_.dropped].Drop(swap_.rank);
    --sent_[HomeOf(swap_.dropped)];
  }
  holders_[swap_.added].Add(swap_.rank);
  ++sent_[HomeOf(swap_.added)];
}

template class Search<1>;
template class Search<2>;
template class Search<4>;
template class Search<16>;

}  // namespace moe_lb
