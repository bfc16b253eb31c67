#include "ffi/planning/greedy.h"

#include <vector>

#include "ffi/common/testing.h"

namespace {

using moe_lb::Greedy;
using moe_lb::MatrixView;
using moe_lb::Status;
using std::vector;

struct Plan {
  size_t num_ranks;
  vector<int32_t> placement;  // [R, S]
  vector<int32_t> quota;      // [E, R]

  Status Run(int64_t domain, int64_t min_tokens) {
    const vector<int32_t> old_placement = placement, old_quota = quota;
    const size_t slots = placement.size() / num_ranks, num_experts = quota.size() / num_ranks;
    return Greedy({old_placement.data(), num_ranks, slots}, {old_quota.data(), num_experts, num_ranks},
                  {domain, min_tokens}, {placement.data(), num_ranks, slots}, {quota.data(), num_experts, num_ranks});
  }
};

// Expert e at home on rank e, serving load[e]; one empty slot on every rank.
Plan Diagonal(const vector<int32_t>& load) {
  Plan plan = {load.size(), {}, vector<int32_t>(load.size() * load.size(), 0)};
  for (size_t rank = 0; rank < load.size(); ++rank) {
    plan.placement.insert(plan.placement.end(), {static_cast<int32_t>(rank), -1});
    plan.quota[rank * load.size() + rank] = load[rank];
  }
  return plan;
}

void ExpectPlan(Plan plan, int64_t domain, int64_t min_tokens, const vector<int32_t>& placement,
                const vector<int32_t>& quota) {
  EXPECT(!plan.Run(domain, min_tokens));
  EXPECT(plan.placement == placement);
  EXPECT(plan.quota == quota);
}

void TheWorkedExample() {
  ExpectPlan(Diagonal({10, 2, 4, 0}), 4, 1, {0, -1, 1, 0, 2, -1, 3, 0},
             {4, 2, 0, 4, 0, 2, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0});
}

void ASmallMoveIsNotWorthAReplica() {
  const Plan plan = Diagonal({11, 9});
  ExpectPlan(plan, 2, 2, plan.placement, plan.quota);
  ExpectPlan(plan, 2, 1, {0, -1, 1, 0}, {10, 1, 0, 9});
}

void AnExistingReplicaComesFirst() {
  Plan plan = Diagonal({12, 0, 6});
  plan.placement[3] = 0;
  ExpectPlan(plan, 3, 1, {0, -1, 1, 0, 2, -1}, {6, 6, 0, 0, 0, 0, 0, 0, 6});
}

void DomainsKeepTheirTokens() {
  ExpectPlan(Diagonal({4, 0, 8, 2}), 2, 1, {0, -1, 1, 0, 2, -1, 3, 2},
             {2, 2, 0, 0, 0, 0, 0, 0, 0, 0, 5, 3, 0, 0, 0, 2});
}

void NoExpertMovesWithoutTokensOrSlots() {
  const Plan idle = Diagonal({0, 0});
  ExpectPlan(idle, 2, 1, idle.placement, idle.quota);
  const Plan full = {2, {0, 1}, {9, 0, 0, 1}};
  ExpectPlan(full, 2, 1, full.placement, full.quota);
}

void BadArgumentsAreNamed() {
  const auto refusal = [](Plan plan, int64_t domain, int64_t min_tokens) { return *plan.Run(domain, min_tokens); };
  EXPECT_EQ(refusal(Diagonal({1, 1}), 0, 1), "domain is 0; expected a divisor of the 2 ranks");
  EXPECT_EQ(refusal(Diagonal({1, 1, 1}), 2, 1), "domain is 2; expected a divisor of the 3 ranks");
  EXPECT_EQ(refusal(Diagonal({1, 1}), 2, 0), "min_tokens is 0; expected at least 1");
  EXPECT_EQ(refusal(Diagonal({1, -1}), 2, 1), "quota of expert 1, rank 1 is -1; expected at least 0");
  EXPECT_EQ(refusal(Diagonal({2147483647, 1}), 2, 1), "quota sums to 2147483648 tokens; expected at most 2147483647");
  EXPECT_EQ(refusal({2, {0, 0}, {1, 0, 1, 0, 1, 0}}, 2, 1),
            "quota has 3 experts; expected a positive multiple of the 2 ranks");
  EXPECT_EQ(refusal({2, {0, 2}, {1, 0, 1, 0}}, 2, 1),
            "placement of rank 1, slot 0 is 2; expected an expert below 2, or -1 for an empty slot");
  EXPECT_EQ(refusal({2, {-2, 1}, {1, 0, 1, 0}}, 2, 1),
            "placement of rank 0, slot 0 is -2; expected an expert below 2, or -1 for an empty slot");
  vector<int32_t> a(4, 0), b(4, 0);
  EXPECT_EQ(*Greedy({a.data(), 2, 2}, {b.data(), 4, 1}, {1, 1}, {a.data(), 2, 2}, {b.data(), 4, 1}),
            "quota has shape [4, 1]; expected [4, 2]");
  EXPECT_EQ(*Greedy({a.data(), 2, 2}, {b.data(), 2, 2}, {1, 1}, {a.data(), 1, 4}, {b.data(), 2, 2}),
            "new_placement has shape [1, 4]; expected [2, 2]");
}

}  // namespace

int main() {
  TheWorkedExample();
  ASmallMoveIsNotWorthAReplica();
  AnExistingReplicaComesFirst();
  DomainsKeepTheirTokens();
  NoExpertMovesWithoutTokensOrSlots();
  BadArgumentsAreNamed();
}
