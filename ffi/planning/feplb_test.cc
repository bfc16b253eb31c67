#include "ffi/planning/feplb.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "ffi/common/testing.h"

namespace {

using moe_lb::Feplb;
using moe_lb::FeplbOptions;
using moe_lb::MatrixView;
using moe_lb::Status;
using std::vector;

struct Plan {
  size_t num_ranks;
  vector<int32_t> placement;  // [R, S]
  vector<int32_t> quota;      // [E, R]

  Status Run(const FeplbOptions& options) {
    const vector<int32_t> old_placement = placement, old_quota = quota;
    const size_t slots = placement.size() / num_ranks, num_experts = quota.size() / num_ranks;
    return Feplb({old_placement.data(), num_ranks, slots}, {old_quota.data(), num_experts, num_ranks}, options,
                 {placement.data(), num_ranks, slots}, {quota.data(), num_experts, num_ranks});
  }

  vector<int32_t> Load() const {
    vector<int32_t> load(num_ranks, 0);
    for (size_t i = 0; i < quota.size(); ++i) load[i % num_ranks] += quota[i];
    return load;
  }
};

// Every expert served at home, tokens[e] of it; so many empty slots on each rank.
Plan AtHome(size_t num_ranks, const vector<int32_t>& tokens, size_t empty) {
  const size_t home = tokens.size() / num_ranks;
  Plan plan = {num_ranks, {}, vector<int32_t>(tokens.size() * num_ranks, 0)};
  for (size_t e = 0; e < tokens.size(); ++e) {
    plan.placement.push_back(static_cast<int32_t>(e));
    plan.quota[e * num_ranks + e / home] = tokens[e];
    if (e % home == home - 1) plan.placement.insert(plan.placement.end(), empty, -1);
  }
  return plan;
}

vector<int32_t> LoadAfter(Plan plan, const FeplbOptions& options) {
  EXPECT(!plan.Run(options));
  return plan.Load();
}

void TheWorkedExample() {
  // Loads 13, 5, 3, 2: expert 0 goes to rank 3, and 9 from there to rank 2; expert 1 would lift rank 1 above rank 0.
  Plan plan = AtHome(4, {6, 4, 3, 4, 1, 0, 2, 1, 0, 1, 1, 0}, 1);
  EXPECT(!plan.Run({4, 3, 8, 1, false}));
  EXPECT((plan.Load() == vector<int32_t>{7, 5, 4, 7}));
  EXPECT((plan.placement == vector<int32_t>{0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, 9, 9, 10, 11, 0}));
  EXPECT_EQ(plan.quota[0], 0);
  EXPECT_EQ(plan.quota[3], 6);
}

void OnlySkipTriesASmallerExpert() {
  // 9 and 2 against 3: the 9 would only swap the ranks.
  const Plan plan = AtHome(2, {9, 2, 2, 1}, 2);
  EXPECT((LoadAfter(plan, {2, 2, 8, 1, false}) == vector<int32_t>{11, 3}));
  EXPECT((LoadAfter(plan, {2, 2, 8, 1, true}) == vector<int32_t>{9, 5}));
  EXPECT((LoadAfter(plan, {2, 1, 8, 1, true}) == vector<int32_t>{11, 3}));  // the 2 is static
}

void ThresholdAndLimits() {
  const Plan plan = AtHome(2, {5, 4, 3, 0, 0, 0}, 3);
  EXPECT((LoadAfter(plan, {2, 3, 8, 1, true}) == vector<int32_t>{7, 5}));
  EXPECT((LoadAfter(plan, {2, 3, 8, 5, true}) == vector<int32_t>{7, 5}));
  EXPECT((LoadAfter(plan, {2, 3, 8, 6, true}) == vector<int32_t>{12, 0}));
  const Plan many = AtHome(2, {3, 3, 3, 3, 3, 3, 0, 0, 0, 0, 0, 0}, 2);
  EXPECT((LoadAfter(many, {2, 6, 8, 1, false}) == vector<int32_t>{12, 6}));  // two slots
  EXPECT((LoadAfter(many, {2, 6, 1, 1, false}) == vector<int32_t>{15, 3}));
  EXPECT((LoadAfter(many, {2, 1, 8, 1, false}) == vector<int32_t>{15, 3}));
}

void DomainsArePlannedEachForItself() {
  EXPECT((LoadAfter(AtHome(4, {3, 3, 0, 0, 9, 8, 0, 0}, 1), {2, 2, 8, 1, false}) == vector<int32_t>{3, 3, 8, 9}));
}

void ARankThatHoldsTheExpertDoesNotTakeIt() {
  Plan plan = AtHome(3, {8, 7, 1, 0, 1, 1}, 2);
  plan.placement[6] = 0;  // a replica of expert 0 on rank 1, which serves none of it
  EXPECT(!plan.Run({3, 1, 8, 1, false}));
  EXPECT((plan.Load() == vector<int32_t>{7, 2, 9}));
}

void BadArgumentsAreNamed() {
  const auto refusal = [](const FeplbOptions& options) { return *AtHome(2, {1, 1}, 1).Run(options); };
  EXPECT_EQ(refusal({3, 1, 1, 1, false}), "domain is 3; expected a divisor of the 2 ranks");
  EXPECT_EQ(refusal({2, 0, 1, 1, false}), "num_dynamic is 0; expected at least 1");
  EXPECT_EQ(refusal({2, 1, -1, 1, false}), "max_num_dyn is -1; expected at least 1");
  EXPECT_EQ(refusal({2, 1, 1, 0, false}), "tau is 0; expected 1 to 2147483647");
  EXPECT_EQ(refusal({2, 1, 1, 2147483648, false}), "tau is 2147483648; expected 1 to 2147483647");
  Plan plan = AtHome(2, {1, 1}, 1);
  plan.placement[0] = 1;
  EXPECT_EQ(*plan.Run({2, 1, 1, 1, false}), "placement of rank 0, slot 0 is 1; expected its home expert 0");
}

void RandomPlansKeepTheirTokens() {
  std::mt19937 random(0);
  const auto below = [&](int32_t n) { return static_cast<int32_t>(random() % static_cast<uint32_t>(n)); };
  for (int trial = 0; trial < 500; ++trial) {
    const size_t members = 1 + random() % 4, num_ranks = members * (1 + random() % 3), home = 1 + random() % 5;
    vector<int32_t> tokens(num_ranks * home);
    for (int32_t& number : tokens) number = below(2) * below(1 + below(1000));
    const Plan before = AtHome(num_ranks, tokens, random() % 4);
    Plan plan = before;
    const bool skip = random() % 2 == 0;
    EXPECT(!plan.Run({static_cast<int64_t>(members), 1 + below(4), 1 + below(3), 1 + below(20), skip}));
    const vector<int32_t> old_load = before.Load(), load = plan.Load();
    for (size_t e = 0; e < tokens.size(); ++e) {
      const auto row = plan.quota.begin() + static_cast<std::ptrdiff_t>(e * num_ranks);
      EXPECT_EQ(std::accumulate(row, row + static_cast<std::ptrdiff_t>(num_ranks), 0), tokens[e]);
      for (size_t r = 0; r < num_ranks; ++r) EXPECT(row[static_cast<std::ptrdiff_t>(r)] % std::max(1, tokens[e]) == 0);
    }
    for (size_t first = 0; first < num_ranks; first += members) {
      const auto highest = [&](const vector<int32_t>& loads) {
        return *std::max_element(loads.begin() + static_cast<std::ptrdiff_t>(first),
                                 loads.begin() + static_cast<std::ptrdiff_t>(first + members));
      };
      EXPECT(highest(load) <= highest(old_load));
    }
  }
}

}  // namespace

int main() {
  TheWorkedExample();
  OnlySkipTriesASmallerExpert();
  ThresholdAndLimits();
  DomainsArePlannedEachForItself();
  ARankThatHoldsTheExpertDoesNotTakeIt();
  BadArgumentsAreNamed();
  RandomPlansKeepTheirTokens();
}
