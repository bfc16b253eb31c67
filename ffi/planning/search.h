// Search over placements, for few slots, if the constructive rules are not close to the mean.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ffi/common/view.h"
#include "ffi/planning/anywhere.h"
#include "ffi/planning/serving.h"
#include "ffi/planning/swap_evaluator.h"

namespace moe_lb {

// Number of steps and tolerance of a search. Both are constants of the caller, so that a plan depends only on its
// input.
struct Effort {
  int64_t steps;
  int64_t margin;  // the initial level is 1 / margin of the first maximum
};

// Tuned on synthetic loads for less than 0.5 ms per search on one core. A brief search has most of the gain of a whole
// one under a limit of replicas, if plans under several limits are compared.
MOE_LB_ANYWHERE Effort SubsetEffort(bool brief) { return {brief ? 80 : 2500, 5}; }

// The time of a step grows with the square of the ranks, so there are fewer with many ranks.
MOE_LB_ANYWHERE Effort FlowEffort(int64_t num_ranks, bool brief) {
  const int64_t steps = brief ? 64 : 500, ranks = brief ? 16 : 64;
  return {num_ranks <= ranks ? steps : steps * ranks * ranks / (num_ranks * num_ranks), 64};
}

// Largest domain that is searched.
constexpr int64_t kMaxSearchedRanks = 1024;

// A maximum load of at most mean + mean / kCloseEnough needs no search.
constexpr int32_t kCloseEnough = 4096;
// Halvings of the range of limits: of loads up to twice the mean, the range is then below mean / kCloseEnough.
constexpr int kLimitRounds = 12;

// Descent under a falling level ("great deluge"). The limit is the best maximum found so far, less one token. A step
// proposes a swap in a slot outside the cut, an empty slot if its rank has one. The added expert is held only by ranks
// of the cut, and takes more tokens out of the cut than the dropped expert brings back. The swap is accepted if the
// largest excess does not rise, or is below the level. The level falls to 0 with the square of the remaining steps.
// Pseudo-random with a fixed seed.
template <size_t W>
class Search {
 public:
  // tokens: [E]. slots: replicas per rank, at least 1. fan_out: replicas of the experts of a home rank.
  Search(View<const int32_t> tokens, size_t num_ranks, size_t slots, size_t fan_out, SwapEvaluator<W>& evaluator);

  // Starts from these replicas; `evaluator` must be in its initial state. Ends early at a maximum of `enough`. Returns
  // the best replicas found, by rank.
  const std::vector<Replica>& Run(const std::vector<Replica>& start, int32_t enough, Effort effort);

 private:
  void Start(const std::vector<Replica>& start);
  bool Propose();
  uint32_t DrawExpert(int32_t more_than);
  uint32_t DrawRank(const std::vector<uint32_t>& ranks);
  void FindSides();
  uint32_t Draw(uint32_t count);
  uint32_t HomeOf(uint32_t expert) const { return static_cast<uint32_t>(expert / home_experts_); }
  void Apply();
  void Record();
  void KeepBest();

  size_t home_experts_;
  size_t slots_;
  size_t fan_out_;
  View<const int32_t> tokens_;
  SwapEvaluator<W>& evaluator_;
  std::vector<uint32_t> by_tokens_;  // [E], each rank's experts, hottest first
  std::vector<int32_t> hot_tokens_;  // [E], tokens of by_tokens_
  std::vector<RankSet<W>> holders_;  // [E]
  std::vector<uint32_t> slot_;       // [R * slots], experts or kNoExpert
  std::vector<size_t> sent_;         // [R], replicas of its experts
  std::vector<uint32_t> inside_;     // ranks of the evaluator's cut
  std::vector<uint32_t> outside_;    // the others
  Swap swap_;                        // proposed
  size_t swap_slot_ = 0;             // index into slot_
  int32_t best_ = 0;
  std::vector<Replica> best_replicas_;
  uint64_t random_ = 1;
};

extern template class Search<1>;
extern template class Search<2>;
extern template class Search<4>;
extern template class Search<16>;

}  // namespace moe_lb
