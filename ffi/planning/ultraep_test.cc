#include "ffi/planning/ultraep.h"

#include <algorithm>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "ffi/common/testing.h"

namespace {

using moe_lb::Status;
using moe_lb::UltraEp;
using std::vector;

struct Plan {
  size_t num_ranks;
  vector<int32_t> placement;  // [R, S]
  vector<int32_t> quota;      // [E, R]

  size_t slots() const { return placement.size() / num_ranks; }
  size_t num_experts() const { return quota.size() / num_ranks; }

  Status Run(int64_t domain, float eps = 0.01f, int64_t min_tokens = 1024) {
    const vector<int32_t> old_placement = placement, old_quota = quota;
    return UltraEp({old_placement.data(), num_ranks, slots()}, {old_quota.data(), num_experts(), num_ranks},
                   {domain, eps, min_tokens}, {placement.data(), num_ranks, slots()},
                   {quota.data(), num_experts(), num_ranks});
  }

  vector<int32_t> Load() const {
    vector<int32_t> load(num_ranks, 0);
    for (size_t i = 0; i < quota.size(); ++i) load[i % num_ranks] += quota[i];
    return load;
  }

  // Contents of a rank's slots beyond the home experts.
  vector<int32_t> Replicas(size_t rank) const {
    const auto begin = placement.begin() + static_cast<std::ptrdiff_t>(rank * slots());
    return {begin + static_cast<std::ptrdiff_t>(num_experts() / num_ranks),
            begin + static_cast<std::ptrdiff_t>(slots())};
  }
};

// Every expert served at home.
Plan AtHome(size_t num_ranks, size_t replica_slots, const vector<int32_t>& tokens) {
  Plan plan = {num_ranks, {}, vector<int32_t>(tokens.size() * num_ranks, 0)};
  const size_t home = tokens.size() / num_ranks;
  for (size_t rank = 0; rank < num_ranks; ++rank) {
    for (size_t i = 0; i < home; ++i) plan.placement.push_back(static_cast<int32_t>(rank * home + i));
    plan.placement.insert(plan.placement.end(), replica_slots, -1);
  }
  for (size_t expert = 0; expert < tokens.size(); ++expert) {
    plan.quota[expert * num_ranks + expert / home] = tokens[expert];
  }
  return plan;
}

// A layer of a real run, 8192 tokens on each of 8 ranks, 4 experts per token: the loads of the ranks
// and of the hottest experts of the overloaded ones are recorded, the rest is filled in.
void ARecordedLayer() {
  Plan plan = AtHome(
      8, 2, {9000,  6000, 4000, 2941, 15000, 16266, 10000, 5564, 17263, 9000, 6000, 3094, 800,  400,  200,  70,
             35500, 3000, 1568, 1000, 2000,  3000,  33824, 300,  38652, 9548, 8000, 5000, 9000, 3000, 2000, 1154});
  EXPECT((plan.Load() == vector<int32_t>{21941, 46830, 35357, 1470, 41068, 39124, 61200, 15154}));
  EXPECT(!plan.Run(8));
  EXPECT((plan.Load() == vector<int32_t>{32174, 33096, 33096, 31394, 33096, 33096, 33096, 33096}));
  const auto quota = [&](size_t expert, size_t rank) { return plan.quota[expert * 8 + rank]; };
  EXPECT_EQ(quota(24, 3), 28104);
  EXPECT_EQ(quota(5, 7), 13734);
  EXPECT_EQ(quota(16, 0), 7972);
  EXPECT_EQ(quota(22, 7), 4208);
  EXPECT_EQ(quota(22, 3), 1820);
  EXPECT_EQ(quota(8, 0), 2261);
  // Slots are filled in the order in which replicas were made.
  EXPECT((plan.Replicas(0) == vector<int32_t>{16, 8}));
  EXPECT((plan.Replicas(3) == vector<int32_t>{24, 22}));
  EXPECT((plan.Replicas(7) == vector<int32_t>{5, 22}));
  for (const size_t rank : {1u, 2u, 4u, 5u, 6u}) EXPECT((plan.Replicas(rank) == vector<int32_t>{-1, -1}));
}

void AllTokensToOneExpert() {
  Plan plan = AtHome(4, 1, {65536, 0, 0, 0});
  EXPECT(!plan.Run(4));
  EXPECT((plan.Load() == vector<int32_t>{16548, 16548, 16548, 15892}));
}

void DomainsArePlannedEachForItself() {
  const vector<vector<int32_t>> tokens = {{900, 0, 0, 100}, {8, 2, 7, 3}};
  Plan both = AtHome(8, 1, {900, 0, 0, 100, 8, 2, 7, 3});
  EXPECT(!both.Run(4, 0.0f, 1));
  for (size_t domain = 0; domain < 2; ++domain) {
    Plan one = AtHome(4, 1, tokens[domain]);
    EXPECT(!one.Run(4, 0.0f, 1));
    for (size_t rank = 0; rank < 4; ++rank) EXPECT_EQ(both.Load()[domain * 4 + rank], one.Load()[rank]);
  }
  EXPECT((both.Load() == vector<int32_t>{250, 250, 250, 250, 5, 5, 5, 5}));
}

// 120 tokens of expert 0, of which a replica on rank 1 serves 30: only rank 2 can help.
Plan OneReplicaSoFar() {
  Plan plan = AtHome(3, 2, {120, 0, 0});
  plan.placement[1 * 3 + 2] = 0;
  plan.quota = {90, 30, 0, 0, 0, 0, 0, 0, 0};
  return plan;
}

// No attempt of the ladder succeeds, at 40 to 42; the search finds the least limit.
void ReplicasThatExistAreKept() {
  Plan plan = OneReplicaSoFar();
  EXPECT(!plan.Run(3, 0.0f, 40));
  EXPECT((plan.placement == vector<int32_t>{0, -1, -1, 1, -1, 0, 2, 0, -1}));
  EXPECT((plan.quota == vector<int32_t>{45, 30, 45, 0, 0, 0, 0, 0, 0}));
}

// A limit of 45 would suffice, but the search tries 50, which is too high for a replica of 45.
void TheSearchCanMissALimit() {
  Plan plan = OneReplicaSoFar();
  EXPECT(!plan.Run(3, 0.0f, 45));
  EXPECT(plan.placement == OneReplicaSoFar().placement);
  EXPECT(plan.quota == OneReplicaSoFar().quota);
}

void WithoutSlotsNoExpertMoves() {
  const Plan before = AtHome(2, 0, {100, 0, 0, 0});
  Plan plan = before;
  EXPECT(!plan.Run(2));
  EXPECT(plan.placement == before.placement);
  EXPECT(plan.quota == before.quota);
}

void NoTokensToServe() {
  Plan plan = AtHome(2, 1, {0, 0});
  EXPECT(!plan.Run(2));
  EXPECT((plan.Load() == vector<int32_t>{0, 0}));
}

void TheLargestLoads() {
  Plan plan = AtHome(4, 1, {std::numeric_limits<int32_t>::max(), 0, 0, 0});
  EXPECT(!plan.Run(4, 1.0f, 1));
  int64_t sum = 0;
  for (const int32_t load : plan.Load()) sum += load;
  EXPECT_EQ(sum, int64_t{std::numeric_limits<int32_t>::max()});
}

void BadArgumentsAreNamed() {
  const auto refusal = [](Plan plan, int64_t domain, float eps, int64_t min_tokens) {
    return plan.Run(domain, eps, min_tokens).value_or("none");
  };
  const Plan good = AtHome(2, 1, {3, 0, 0, 0});
  EXPECT_EQ(refusal(good, 2, 0.01f, 1), "none");
  EXPECT_EQ(refusal(good, 0, 0.01f, 1), "domain is 0; expected a divisor of the 2 ranks");
  EXPECT_EQ(refusal(good, 2, -0.5f, 1), "eps is -0.5; expected 0 to 1");
  EXPECT_EQ(refusal(good, 2, std::numeric_limits<float>::quiet_NaN(), 1), "eps is nan; expected 0 to 1");
  EXPECT_EQ(refusal(good, 2, 0.01f, 0), "min_tokens is 0; expected at least 1");
  Plan bad = good;
  bad.placement[1] = 3;
  EXPECT_EQ(refusal(bad, 2, 0.01f, 1), "placement of rank 0, slot 1 is 3; expected its home expert 1");
  bad = good;
  bad.quota[5] = -7;
  EXPECT_EQ(refusal(bad, 2, 0.01f, 1), "quota of expert 2, rank 1 is -7; expected at least 0");
  bad = {2, {0, 2}, {1, 0, 0, 0, 0, 1, 0, 0}};
  EXPECT_EQ(refusal(bad, 2, 0.01f, 1), "placement has 1 slots; expected at least the 2 home experts of a rank");
}

// Random plans, also invalid ones beyond the planner's checks: every sum is conserved, and no expert is twice on a
// rank.
void RandomPlansKeepTheirTokens() {
  std::mt19937 random(0);
  const auto below = [&](size_t bound) { return random() % bound; };
  for (int i = 0; i < 2000; ++i) {
    const size_t members = 1 + below(5), num_ranks = members * (1 + below(3)), home = 1 + below(3);
    vector<int32_t> tokens;
    for (size_t e = 0; e < num_ranks * home; ++e) tokens.push_back(static_cast<int32_t>(below(3) * below(200)));
    Plan plan = AtHome(num_ranks, below(4), tokens);
    for (int32_t& slot : plan.placement) {
      if (slot < 0 && below(3) == 0) slot = static_cast<int32_t>(below(plan.num_experts()));
    }
    for (size_t n = below(10); n > 0; --n) plan.quota[below(plan.quota.size())] += static_cast<int32_t>(below(50));
    const Plan before = plan;
    EXPECT(!plan.Run(static_cast<int64_t>(members), static_cast<float>(below(3)) / 100,
                     1 + static_cast<int64_t>(below(30))));
    const vector<int32_t> load = plan.Load(), old_load = before.Load();
    for (size_t first = 0; first < num_ranks; first += members) {
      const auto largest = [&](const vector<int32_t>& of) {
        const auto begin = of.begin() + static_cast<std::ptrdiff_t>(first);
        return *std::max_element(begin, begin + static_cast<std::ptrdiff_t>(members));
      };
      EXPECT(largest(load) <= largest(old_load));
    }
    for (size_t e = 0; e < plan.num_experts(); ++e) {
      int64_t change = 0;
      for (size_t r = 0; r < num_ranks; ++r) {
        const int64_t tokens_moved = plan.quota[e * num_ranks + r] - before.quota[e * num_ranks + r];
        change += tokens_moved;
        EXPECT(tokens_moved >= 0 || r == e / home);
        EXPECT(tokens_moved <= 0 || r / members == e / home / members);
      }
      EXPECT_EQ(change, 0);
    }
    for (size_t s = 0; s < plan.placement.size(); ++s) {
      if (before.placement[s] >= 0) EXPECT_EQ(plan.placement[s], before.placement[s]);
    }
  }
}

}  // namespace

int main() {
  ARecordedLayer();
  AllTokensToOneExpert();
  DomainsArePlannedEachForItself();
  ReplicasThatExistAreKept();
  TheSearchCanMissALimit();
  WithoutSlotsNoExpertMoves();
  NoTokensToServe();
  TheLargestLoads();
  BadArgumentsAreNamed();
  RandomPlansKeepTheirTokens();
}
