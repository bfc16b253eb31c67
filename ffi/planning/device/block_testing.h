// Random loads for planners of one block, and the test that each of their barriers is needed.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <random>
#include <set>
#include <vector>

#include "ffi/common/testing.h"
#include "ffi/planning/device/fibers.h"

namespace moe_lb::device {

// Counts of lognormal experts on uneven ranks, of up to `scale` tokens for a usual expert, some of them 0.
inline std::vector<int32_t> Skewed(std::mt19937& random, int num_ranks, int home, double scale) {
  std::normal_distribution<double> normal;
  std::vector<int32_t> counts(static_cast<size_t>(num_ranks * num_ranks * home));
  const double skew = 0.2 + static_cast<double>(random() % 100) / 80;
  for (int expert = 0; expert < num_ranks * home; ++expert) {
    const double tokens = random() % 6 == 0 ? 0 : scale * std::exp(skew * normal(random));
    for (int rank = 0; rank < num_ranks; ++rank) {
      const double share = std::min(tokens * std::exp(normal(random)) / num_ranks, 1e9 / num_ranks / num_ranks / home);
      counts[static_cast<size_t>(rank * num_ranks * home + expert)] = static_cast<int32_t>(share);
    }
  }
  return counts;
}

inline int Pick(std::mt19937& random, int low, int high) {
  return low + static_cast<int>(random() % static_cast<uint32_t>(high - low + 1));
}

// Without any one barrier, some check must fail: another plan, accesses without order, or lanes at different
// operations. All checks run on `block`. Returns the number of barriers.
inline size_t ExpectEveryBarrierIsNeeded(Fibers& block, const std::vector<std::function<bool()>>& checks) {
  block.order = Order::kRandom;
  for (const auto& check : checks) EXPECT(check());
  const std::set<Barrier> barriers = block.barriers();
  int needless = 0;
  for (const Barrier& barrier : barriers) {
    block.disabled = barrier;
    bool is_found = false;
    for (size_t i = 0; i < checks.size() && !is_found; ++i) {
      block.ForgetFaults();
      is_found = !checks[i]();
    }
    if (is_found) continue;
    std::fprintf(stderr, "%s:%d: no case needs this barrier\n", barrier.file, barrier.line);
    ++needless;
  }
  EXPECT_EQ(needless, 0);
  return barriers.size();
}

}  // namespace moe_lb::device
