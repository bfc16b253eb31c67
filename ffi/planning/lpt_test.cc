#include "ffi/planning/lpt.h"

#include <vector>

#include "ffi/common/testing.h"

namespace {

using moe_lb::Lpt;
using moe_lb::Status;
using moe_lb::View;

std::vector<int32_t> Bins(const std::vector<int32_t>& weights, int64_t num_bins, int64_t capacity) {
  std::vector<int32_t> bins(weights.size(), -1);
  EXPECT(!Lpt({weights.data(), weights.size()}, num_bins, capacity, {bins.data(), bins.size()}));
  return bins;
}

void HeaviestFirstIntoTheLightest() { EXPECT((Bins({1, 5, 3, 4}, 2, 4) == std::vector<int32_t>{0, 0, 1, 1})); }

void TiesGoToTheLowerIndex() { EXPECT((Bins({2, 2, 2, 2}, 2, 2) == std::vector<int32_t>{0, 1, 0, 1})); }

void AFullBinTakesNoMore() { EXPECT((Bins({9, 1, 1, 1}, 2, 2) == std::vector<int32_t>{0, 1, 1, 0})); }

void NothingToPlace() { EXPECT(Bins({}, 3, 0).empty()); }

void BadArgumentsAreNamed() {
  const std::vector<int32_t> weights = {1, -2};
  std::vector<int32_t> bins(2);
  const auto refusal = [&](int64_t num_bins, int64_t capacity) {
    return *Lpt({weights.data(), 2}, num_bins, capacity, {bins.data(), 2});
  };
  EXPECT_EQ(refusal(0, 2), "num_bins is 0; expected at least 1");
  EXPECT_EQ(refusal(1, 1), "capacity is 1; expected at least 2 for 2 items in 1 bins");
  EXPECT_EQ(refusal(1, 2), "weights of item 1 is -2; expected at least 0");
  EXPECT_EQ(*Lpt({weights.data(), 2}, 1, 2, {bins.data(), 1}), "bins has 1 entries; expected 2, as weights has");
  const std::vector<int32_t> huge = {2147483647, 1};
  EXPECT_EQ(*Lpt({huge.data(), 2}, 1, 2, {bins.data(), 2}), "weights sum to 2147483648; expected at most 2147483647");
}

void MoreBinsThanMemoryHolds() { EXPECT((Bins({1, 2}, int64_t{1} << 62, 1) == std::vector<int32_t>{1, 0})); }

}  // namespace

int main() {
  HeaviestFirstIntoTheLightest();
  TiesGoToTheLowerIndex();
  AFullBinTakesNoMore();
  NothingToPlace();
  BadArgumentsAreNamed();
  MoreBinsThanMemoryHolds();
}
