// Sets of ranks, and the rank with the most or least of an amount, by the lanes of a warp.
//
// A lane stands for the ranks lane, lane + 32 and so on.
#pragma once

#include "ffi/planning/device/threads.h"

namespace moe_lb::device {

constexpr int kMaxRanks = 128;  // of a block

// Whether offsets of quota and placement in global memory fit 31 bits.
inline bool HasSmallOffsets(int64_t all_ranks, int64_t all_experts, int64_t slots) {
  return all_ranks * all_experts <= INT32_MAX && all_ranks * slots <= INT32_MAX;
}

// Words of a set of ranks: 1, 2 or 4, because planners are compiled for each number.
MOE_LB_ANYWHERE size_t NumWords(int num_ranks) { return num_ranks <= kLanes ? 1 : num_ranks <= 2 * kLanes ? 2 : 4; }

// A set of up to 32 * W ranks, the same on all lanes.
template <int W>
struct Ranks {
  uint32_t words[size_t{W}];

  MOE_LB_DEVICE bool Has(int rank) const {
    uint32_t word = words[0];
    for (int k = 1; k < W; ++k) word = rank / kLanes == k ? words[k] : word;
    return (word >> (rank % kLanes) & 1) != 0;
  }
  MOE_LB_DEVICE void Add(int rank) {
    for (int k = 0; k < W; ++k) words[k] |= rank / kLanes == k ? 1u << (rank % kLanes) : 0;
  }
  MOE_LB_DEVICE void Drop(int rank) {
    for (int k = 0; k < W; ++k) words[k] &= rank / kLanes == k ? ~(1u << (rank % kLanes)) : 0xffffffffu;
  }
  MOE_LB_DEVICE bool Any() const {
    uint32_t any = 0;
    for (int k = 0; k < W; ++k) any |= words[k];
    return any != 0;
  }
  MOE_LB_DEVICE int Count() const {
    int count = 0;
    for (int k = 0; k < W; ++k) count += NumBits(words[k]);
    return count;
  }
  MOE_LB_DEVICE int Lowest() const {
    int lowest = -1;
    for (int k = W - 1; k >= 0; --k) lowest = words[k] != 0 ? kLanes * k + LowestBit(words[k]) : lowest;
    return lowest;
  }
};

template <int W>
MOE_LB_DEVICE Ranks<W> NoRanks() {
  Ranks<W> none;
  for (int k = 0; k < W; ++k) none.words[k] = 0;
  return none;
}

// Returns the value of a rank. values: of the ranks of this lane. The rank may differ between lanes.
template <int W, typename T, typename V>
MOE_LB_DEVICE V ValueOf(const T& t, const V (&values)[size_t{W}], int rank) {
  V found = 0;
  for (int k = 0; k < W; ++k) {
    const V its = t.From(values[k], rank % kLanes);
    if (rank / kLanes == k) found = its;
  }
  return found;
}

// The lowest rank with the largest amount, -1 if all are 0, and the amount. amounts: of the ranks of this lane.
struct Peak {
  int rank;
  uint32_t amount;
};

template <int W, typename T>
MOE_LB_DEVICE Peak FindPeak(const T& t, const uint32_t (&amounts)[size_t{W}]) {
  uint32_t most = 0;
  for (int k = 0; k < W; ++k) most = Most(most, amounts[k]);
  most = t.Max(most);
  if (most == 0) return {-1, 0};
  Ranks<W> peaks;
  for (int k = 0; k < W; ++k) peaks.words[k] = t.Ballot(amounts[k] == most);
  return {peaks.Lowest(), most};
}

}  // namespace moe_lb::device
