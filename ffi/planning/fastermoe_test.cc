#include "ffi/planning/fastermoe.h"

#include <vector>

#include "ffi/common/testing.h"

namespace {

using moe_lb::FasterMoe;
using moe_lb::Status;
using std::vector;

struct Plan {
  size_t num_ranks;
  vector<int32_t> placement;  // [R, S]
  vector<int32_t> quota;      // [E, R]
  vector<int32_t> counts;     // [R, E]

  Status Run(int64_t domain, int64_t min_saved) {
    const vector<int32_t> old_placement = placement, old_quota = quota;
    const size_t slots = placement.size() / num_ranks, num_experts = quota.size() / num_ranks;
    return FasterMoe({old_placement.data(), num_ranks, slots}, {old_quota.data(), num_experts, num_ranks},
                     {counts.data(), num_ranks, num_experts}, {domain, min_saved}, {placement.data(), num_ranks, slots},
                     {quota.data(), num_experts, num_ranks});
  }
};

// One expert on each rank, served at home, and one empty slot.
Plan AtHome(size_t num_ranks, const vector<int32_t>& counts) {
  Plan plan = {num_ranks, {}, vector<int32_t>(num_ranks * num_ranks, 0), counts};
  for (size_t rank = 0; rank < num_ranks; ++rank) {
    plan.placement.insert(plan.placement.end(), {static_cast<int32_t>(rank), -1});
    for (size_t from = 0; from < num_ranks; ++from) {
      plan.quota[rank * num_ranks + rank] += counts[from * num_ranks + rank];
    }
  }
  return plan;
}

void ACopyServesItsOwnRank() {
  Plan plan = AtHome(2, {5, 1, 4, 2});  // loads 9, 3; after the copy 5, 7
  EXPECT(!plan.Run(2, 2));
  EXPECT((plan.placement == vector<int32_t>{0, -1, 1, 0}));
  EXPECT((plan.quota == vector<int32_t>{5, 4, 0, 3}));
}

void ACopyMustSaveEnough() {
  Plan plan = AtHome(2, {5, 1, 4, 2});
  const Plan before = plan;
  EXPECT(!plan.Run(2, 3));
  EXPECT(plan.placement == before.placement && plan.quota == before.quota);
}

void EveryRankNeedsASlot() {
  Plan plan = AtHome(3, {9, 0, 0, 9, 0, 0, 9, 0, 0});
  plan.placement[3] = 2;  // rank 1 has no slot left
  const Plan before = plan;
  EXPECT(!plan.Run(3, 1));
  EXPECT(plan.quota == before.quota);
  plan.placement[3] = -1;
  EXPECT(!plan.Run(3, 1));
  EXPECT((plan.quota == vector<int32_t>{9, 9, 9, 0, 0, 0, 0, 0, 0}));
}

void AnExpertWithAReplicaIsLeftAlone() {
  Plan plan = AtHome(2, {9, 0, 9, 0});
  plan.placement = {0, -1, 1, 0};
  const Plan before = plan;
  EXPECT(!plan.Run(2, 1));
  EXPECT(plan.placement == before.placement && plan.quota == before.quota);
}

void TokensOfOtherDomainsAreServedAtHome() {
  Plan plan = AtHome(4, {4, 0, 0, 0, 4, 0, 0, 0, 3, 0, 0, 0, 0, 0, 2, 0});
  EXPECT(!plan.Run(2, 1));
  EXPECT((plan.quota == vector<int32_t>{7, 4, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0}));
}

void BadArgumentsAreNamed() {
  const auto refusal = [](Plan plan, int64_t domain, int64_t min_saved) { return *plan.Run(domain, min_saved); };
  const Plan plan = AtHome(2, {1, 1, 1, 1});
  EXPECT_EQ(refusal(plan, 0, 1), "domain is 0; expected a divisor of the 2 ranks");
  EXPECT_EQ(refusal(plan, 2, 0), "min_saved is 0; expected 1 to 2147483647");
  EXPECT_EQ(refusal({2, {0, 1}, {1, 0, 0, 1}, {1, -1, 0, 1}}, 2, 1),
            "counts of rank 0, expert 1 is -1; expected at least 0");
  EXPECT_EQ(refusal({2, {0, 1}, {1, 0, 0, 1}, {2147483647, 1, 0, 1}}, 2, 1),
            "counts sum to 2147483649 tokens; expected at most 2147483647");
  EXPECT_EQ(refusal({2, {1, 0}, {1, 0, 0, 1}, {1, 1, 0, 1}}, 2, 1),
            "placement of rank 0, slot 0 is 1; expected its home expert 0");
}

}  // namespace

int main() {
  ACopyServesItsOwnRank();
  ACopyMustSaveEnough();
  EveryRankNeedsASlot();
  AnExpertWithAReplicaIsLeftAlone();
  TokensOfOtherDomainsAreServedAtHome();
  BadArgumentsAreNamed();
}
