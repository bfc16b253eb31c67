// Evaluates swaps of a placement: the excess of its loads above a limit, and the ranks causing it.
#pragma once

#include <cstdint>
#include <limits>

#include "ffi/planning/rank_set.h"

namespace moe_lb {

// One slot of `rank` loses the expert `dropped`, if it had one, and gets `added`.
struct Swap {
  static constexpr uint32_t kNoExpert = UINT32_MAX;
  uint32_t rank;
  uint32_t dropped;
  uint32_t added;
};

// The excess of a set of ranks is the number of tokens that only its ranks can serve, minus its size times the limit.
// By max-flow and min-cut, some quota keeps the limit if and only if no set has an excess above 0. The largest excess
// is the number of tokens beyond the limit. Sets have W words.
template <size_t W>
class SwapEvaluator {
 public:
  virtual ~SwapEvaluator() = default;

  // True if no excess is above `threshold` (at least 0) after the swap.
  virtual bool Keeps(const Swap& swap, int32_t threshold) = 0;
  virtual void Commit(const Swap& swap) = 0;

  // Adds a replica without a search for the cut, which SetLimit must follow.
  virtual void Place(uint32_t expert, uint32_t rank) = 0;
  virtual void SetLimit(int32_t limit) = 0;

  // Returns the lowest limit kept by the placement.
  virtual int32_t MaxLoad() = 0;

  // The largest excess, 0 if none is above 0. If it is above 0, cut() is the smallest set with this excess, which all
  // others contain.
  int32_t worst() const { return worst_; }
  const RankSet<W>& cut() const { return cut_; }

 protected:
  int32_t worst_ = 0;
  RankSet<W> cut_;
};

}  // namespace moe_lb
