#include "ffi/planning/subset_evaluator.h"

#include <algorithm>
#include <limits>

namespace moe_lb {

SubsetEvaluator::SubsetEvaluator(View<const int32_t> tokens, size_t num_ranks)
    : num_sets_(size_t{1} << num_ranks), tokens_(tokens) {
  const size_t home_experts = tokens.size() / num_ranks;
  std::array<int32_t, kMaxRanks> load = {};
  for (size_t expert = 0; expert < tokens.size(); ++expert) {
    holders_.push_back(1 << (expert / home_experts));
    load[expert / home_experts] += tokens[expert];
  }
  // Sets with nonexistent ranks must never have the largest excess. Half of the minimum leaves a margin for later
  // subtractions.
  excess_.fill(std::numeric_limits<int32_t>::min() / 2);
  size_[0] = 0;
  for (size_t set = 1; set < num_sets_; ++set) {
    size_t lowest = 0;
    while ((set >> lowest & 1) == 0) ++lowest;
    const size_t others = set & (set - 1);
    size_[set] = size_[others] + 1;
    excess_[set] = load[lowest] + (others == 0 ? 0 : excess_[others]);
  }
  FindCut();
}

SubsetEvaluator::Change SubsetEvaluator::Dropped(const Swap& swap) const {
  if (swap.dropped == Swap::kNoExpert) return {0, 0};
  return {holders_[swap.dropped] & ~(1 << swap.rank), tokens_[swap.dropped]};
}

SubsetEvaluator::Change SubsetEvaluator::Added(const Swap& swap) const {
  return {holders_[swap.added], tokens_[swap.added]};
}

// Evaluated in blocks without branches, for vectorization. The block that rejected the last swap goes first: most swaps
// are refused, mostly by the same block.
bool SubsetEvaluator::Keeps(const Swap& swap, int32_t threshold) {
  constexpr int32_t kBlock = kSets / kBlocks;
  const Change dropped = Dropped(swap);
  const Change added = Added(swap);
  const int32_t back = dropped.holders | 1 << swap.rank;
  const int32_t gone = added.holders | 1 << swap.rank;
  for (int32_t i = 0; i < kBlocks; ++i) {
    const int32_t block = (refused_ + i) % kBlocks;
    int32_t room = 0;  // negative if some set has no room
    for (int32_t set = block * kBlock; set < (block + 1) * kBlock; ++set) {
      const int32_t more = (set & back) == dropped.holders ? dropped.tokens : 0;
      const int32_t less = (set & gone) == added.holders ? added.tokens : 0;
      // The bitwise or is negative if any set has no room, which saves a branch per set.
      room |= threshold - excess_[static_cast<size_t>(set)] - more + less;
    }
    if (room < 0) {
      refused_ = block;
      return false;
    }
  }
  return true;
}

void SubsetEvaluator::Commit(const Swap& swap) {
  Apply(swap);
  FindCut();
}

void SubsetEvaluator::Apply(const Swap& swap) {
  const Change dropped = Dropped(swap);
  const Change added = Added(swap);
  const int32_t back = dropped.holders | 1 << swap.rank;
  const int32_t gone = added.holders | 1 << swap.rank;
  for (int32_t set = 0; set < static_cast<int32_t>(kSets); ++set) {
    const int32_t more = (set & back) == dropped.holders ? dropped.tokens : 0;
    const int32_t less = (set & gone) == added.holders ? added.tokens : 0;
    excess_[static_cast<size_t>(set)] += more - less;
  }
  if (swap.dropped != Swap::kNoExpert) holders_[swap.dropped] &= ~(1 << swap.rank);
  holders_[swap.added] |= 1 << swap.rank;
}

void SubsetEvaluator::Place(uint32_t expert, uint32_t rank) { Apply({rank, Swap::kNoExpert, expert}); }

void SubsetEvaluator::SetLimit(int32_t limit) {
  for (size_t set = 1; set < num_sets_; ++set) excess_[set] += size_[set] * (limit_ - limit);
  limit_ = limit;
  FindCut();
}

int32_t SubsetEvaluator::MaxLoad() {
  int32_t highest = 0;
  for (size_t set = 1; set < num_sets_; ++set) {
    const int32_t tokens = excess_[set] + size_[set] * limit_;
    // The excess of a set at limit 0 is the number of tokens that only its ranks can serve. So the quotient, rounded
    // up, is a lower bound of the maximum, and some quota reaches the largest of them.
    highest = std::max(highest, (tokens + size_[set] - 1) / size_[set]);
  }
  return highest;
}

// Of all sets with the largest excess, the one with the lowest number is contained in all others. Searched in blocks,
// for vectorization.
void SubsetEvaluator::FindCut() {
  constexpr size_t kBlock = 16;
  worst_ = 0;
  for (const int32_t excess : excess_) worst_ = worst_ > excess ? worst_ : excess;
  if (worst_ == 0) return;
  for (size_t first = 0; first < kSets; first += kBlock) {
    int32_t found = 0;
    for (size_t set = first; set < first + kBlock; ++set) found |= excess_[set] == worst_ ? 1 : 0;
    if (found == 0) continue;
    size_t set = first;
    while (excess_[set] != worst_) ++set;
    cut_ = RankSet<1>(set);
    return;
  }
}

}  // namespace moe_lb
