#include "ffi/planning/exact.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "ffi/common/testing.h"
#include "ffi/planning/flow_evaluator.h"
#include "ffi/planning/serving.h"
#include "ffi/planning/subset_evaluator.h"

namespace moe_lb {
namespace {

struct Plan {
  size_t num_ranks;
  std::vector<int32_t> placement;  // [R, S]
  std::vector<int32_t> quota;      // [E, R]

  size_t slots() const { return placement.size() / num_ranks; }
  int64_t MaxLoad() const {
    std::vector<int64_t> load(num_ranks, 0);
    for (size_t i = 0; i < quota.size(); ++i) load[i % num_ranks] += quota[i];
    return *std::max_element(load.begin(), load.end());
  }
  size_t Replicas() const {
    const auto filled = placement.size() - static_cast<size_t>(std::count(placement.begin(), placement.end(), -1));
    return filled - quota.size() / num_ranks;
  }
};

Plan Make(const std::vector<int32_t>& tokens, size_t num_ranks, size_t slots, const ExactOptions& options = {}) {
  Plan plan = {num_ranks, std::vector<int32_t>(num_ranks * slots), std::vector<int32_t>(tokens.size() * num_ranks)};
  const Status bad = Exact({tokens.data(), tokens.size()}, options, {plan.placement.data(), num_ranks, slots},
                           {plan.quota.data(), tokens.size(), num_ranks});
  EXPECT_EQ(bad.value_or(""), "");
  return plan;
}

// Lognormal experts on uneven ranks; up to `scale` tokens for an ordinary expert.
std::vector<int32_t> Skewed(std::mt19937& random, size_t num_ranks, size_t home_experts, double scale) {
  std::normal_distribution<double> normal;
  std::vector<int32_t> tokens;
  for (size_t rank = 0; rank < num_ranks; ++rank) {
    const double popular = std::exp(0.4 * normal(random));
    for (size_t i = 0; i < home_experts; ++i) {
      tokens.push_back(static_cast<int32_t>(scale * popular * std::exp(0.8 * normal(random))));
    }
  }
  return tokens;
}

int64_t Sum(const std::vector<int32_t>& tokens) { return std::accumulate(tokens.begin(), tokens.end(), int64_t{0}); }

void ExpectLegal(const Plan& plan, const std::vector<int32_t>& tokens, size_t fan_out = SIZE_MAX) {
  const size_t home_experts = tokens.size() / plan.num_ranks;
  std::set<std::pair<size_t, size_t>> held;
  std::vector<size_t> sent(plan.num_ranks, 0);
  for (size_t i = 0; i < plan.placement.size(); ++i) {
    const int32_t expert = plan.placement[i];
    const size_t rank = i / plan.slots();
    const size_t place = i % plan.slots();
    if (place < home_experts) EXPECT_EQ(static_cast<size_t>(expert), rank * home_experts + place);
    if (expert < 0) continue;
    EXPECT(held.insert({static_cast<size_t>(expert), rank}).second);
    if (place >= home_experts) ++sent[static_cast<size_t>(expert) / home_experts];
    const int32_t quota = plan.quota[static_cast<size_t>(expert) * plan.num_ranks + rank];
    EXPECT(quota > 0 || place < home_experts);
  }
  EXPECT(*std::max_element(sent.begin(), sent.end()) <= fan_out);
  for (size_t expert = 0; expert < tokens.size(); ++expert) {
    int64_t sum = 0;
    for (size_t rank = 0; rank < plan.num_ranks; ++rank) {
      const int32_t quota = plan.quota[expert * plan.num_ranks + rank];
      EXPECT(quota == 0 || (quota > 0 && held.count({expert, rank}) == 1));
      sum += quota;
    }
    EXPECT_EQ(sum, tokens[expert]);
  }
}

// The lowest maximum load of a placement, from its sets of ranks.
int64_t BestMaxLoad(const std::vector<int32_t>& tokens, size_t num_ranks, const std::vector<Replica>& replicas) {
  std::vector<size_t> holders;
  for (size_t expert = 0; expert < tokens.size(); ++expert) {
    holders.push_back(size_t{1} << (expert / (tokens.size() / num_ranks)));
  }
  for (const Replica& replica : replicas) holders[replica.expert] |= size_t{1} << replica.rank;
  int64_t best = 0;
  for (size_t set = 1; set < size_t{1} << num_ranks; ++set) {
    int64_t size = 0;
    for (size_t rank = 0; rank < num_ranks; ++rank) size += static_cast<int64_t>(set >> rank & 1);
    int64_t stuck = 0;
    for (size_t expert = 0; expert < tokens.size(); ++expert)
      stuck += (holders[expert] & ~set) == 0 ? tokens[expert] : 0;
    best = std::max(best, (stuck + size - 1) / size);
  }
  return best;
}

void AHotExpertIsSpreadEvenly() {
  const Plan plan = Make({13, 1, 1, 1}, 4, 2);
  ExpectLegal(plan, {13, 1, 1, 1});
  EXPECT_EQ(plan.MaxLoad(), 4);
  EXPECT_EQ(plan.Replicas(), 3u);
}

// Ranks 0 and 1 have 2 and 5 above the mean of 10, ranks 2 and 3 have room for 3 and 4, in one slot each. Moving
// no more than a surplus leaves at least 1 behind. Rank 1 fills rank 3; rank 0 fills rank 2, one more than
// its surplus, and takes the last one of rank 1.
void ADonorMayGiveMoreThanItsSurplusAndRefill() {
  const std::vector<int32_t> tokens = {12, 15, 7, 6};
  const Plan plan = Make(tokens, 4, 2);
  ExpectLegal(plan, tokens);
  EXPECT_EQ(plan.MaxLoad(), 10);
  EXPECT_EQ(plan.Replicas(), 3u);
}

void BalancedOrEmptyNeedsNoReplica() {
  EXPECT_EQ(Make({5, 5, 5, 5}, 2, 4).Replicas(), 0u);
  EXPECT_EQ(Make({0, 0, 0, 0}, 2, 4).Replicas(), 0u);
  EXPECT_EQ(Make({7, 0}, 1, 2).MaxLoad(), 7);
  EXPECT_EQ(Make({8, 0, 0, 0}, 2, 2).MaxLoad(), 8);
}

void RoomForAnythingIsTakenAtOnce() {
  ExactOptions options;
  options.eps = 1e300;
  EXPECT_EQ(Make({9, 1, 1, 1}, 4, 2, options).Replicas(), 0u);
}

void TokensUpToTheLargestInteger() {
  const std::vector<int32_t> tokens = {INT32_MAX, 0, 0, 0, 0, 0, 0, 0};
  ExactOptions options;
  options.eps = 0.5;
  ExpectLegal(Make(tokens, 8, 2), tokens);
  ExpectLegal(Make(tokens, 8, 2, options), tokens);
  EXPECT_EQ(Make(tokens, 8, 2).MaxLoad(), 268435456);
}

void NoSenderExceedsItsFanOut() {
  std::mt19937 random(1);
  for (int64_t fan_out = 0; fan_out < 4; ++fan_out) {
    const auto tokens = Skewed(random, 8, 6, 1000);
    ExactOptions options;
    options.max_fan_out = fan_out;
    options.eps = 0.02;
    ExpectLegal(Make(tokens, 8, 8, options), tokens, static_cast<size_t>(fan_out));
  }
}

void LevelIsTheBestQuotaOfAPlacement() {
  std::mt19937 random(2);
  for (int round = 0; round < 300; ++round) {
    const size_t num_ranks = 2 + random() % 5;
    const auto tokens = Skewed(random, num_ranks, 3, 50);
    Serving serving({tokens.data(), tokens.size()}, num_ranks);
    std::vector<Replica> replicas;
    for (uint32_t expert = 0; expert < tokens.size(); ++expert) {
      const auto rank = static_cast<uint32_t>(random() % num_ranks);
      if (rank != expert / 3) replicas.push_back({expert, rank});
    }
    for (const Replica& replica : replicas) serving.Add(replica.expert, replica.rank, 0);
    const auto count = static_cast<int64_t>(num_ranks);
    EXPECT_EQ(serving.Level(static_cast<int32_t>((Sum(tokens) + count - 1) / count)),
              BestMaxLoad(tokens, num_ranks, replicas));
    EXPECT_EQ(serving.MaxLoad(), BestMaxLoad(tokens, num_ranks, replicas));
  }
}

void BothEvaluatorsAgree() {
  std::mt19937 random(3);
  for (int round = 0; round < 50; ++round) {
    const auto num_ranks = static_cast<uint32_t>(2 + random() % 7);
    const auto tokens = Skewed(random, num_ranks, 4, 100);
    const View<const int32_t> view(tokens.data(), tokens.size());
    SubsetEvaluator subset(view, num_ranks);
    FlowEvaluator flow(view, num_ranks, 1);
    std::vector<uint32_t> slot(num_ranks, Swap::kNoExpert);
    for (int step = 0; step < 60; ++step) {
      const auto rank = static_cast<uint32_t>(random() % num_ranks);
      const auto expert = static_cast<uint32_t>(random() % tokens.size());
      const auto threshold = static_cast<int32_t>(random() % 200);
      if (expert / 4 == rank || expert == slot[rank]) continue;
      const Swap swap = {rank, slot[rank], expert};
      EXPECT_EQ(subset.Keeps(swap, threshold), flow.Keeps(swap, threshold));
      subset.Commit(swap);
      flow.Commit(swap);
      slot[rank] = expert;
      EXPECT_EQ(subset.MaxLoad(), flow.MaxLoad());
      if (step % 5 == 0) {
        const int32_t limit = subset.MaxLoad() - static_cast<int32_t>(random() % 30);
        subset.SetLimit(limit);
        flow.SetLimit(limit);
      }
      EXPECT_EQ(subset.worst(), flow.worst());
      if (subset.worst() > 0) EXPECT_EQ(subset.cut(), flow.cut());
    }
  }
}

// All placements of three ranks with four experts each and one slot.
int64_t Optimum(const std::vector<int32_t>& tokens) {
  int64_t best = INT64_MAX;
  for (uint32_t a = 0; a <= 8; ++a) {  // 8: none
    for (uint32_t b = 0; b <= 8; ++b) {
      for (uint32_t c = 0; c <= 8; ++c) {
        std::vector<Replica> replicas;
        if (a < 8) replicas.push_back({a + 4, 0});
        if (b < 8) replicas.push_back({b < 4 ? b : b + 4, 1});
        if (c < 8) replicas.push_back({c, 2});
        best = std::min(best, BestMaxLoad(tokens, 3, replicas));
      }
    }
  }
  return best;
}

// Loads whose mean is below 4096, so that a search does not end before the optimum.
void SmallCasesAreSolvedToTheOptimum() {
  std::mt19937 random(4);
  int above_mean = 0;
  for (int round = 0; round < 100; ++round) {
    std::vector<int32_t> tokens;
    for (const uint32_t most : {1000u, 500u, 50u}) {
      for (int i = 0; i < 4; ++i) tokens.push_back(static_cast<int32_t>(1 + random() % most));
    }
    const Plan plan = Make(tokens, 3, 5);
    ExpectLegal(plan, tokens);
    EXPECT_EQ(plan.MaxLoad(), Optimum(tokens));
    above_mean += plan.MaxLoad() > (Sum(tokens) + 2) / 3;
  }
  EXPECT(above_mean > 20);
}

void EpsTradesLoadForReplicas() {
  std::mt19937 random(5);
  for (const size_t num_ranks : {size_t{8}, size_t{16}, size_t{70}}) {
    const auto tokens = Skewed(random, num_ranks, 8, 1e4);
    const Plan exact = Make(tokens, num_ranks, 10);
    size_t fewest = exact.Replicas();
    for (const double eps : {0.01, 0.1, 1.0}) {
      ExactOptions options;
      options.eps = eps;
      const Plan plan = Make(tokens, num_ranks, 10, options);
      ExpectLegal(plan, tokens);
      EXPECT(static_cast<double>(plan.MaxLoad()) <= (1 + eps) * static_cast<double>(exact.MaxLoad()));
      EXPECT(plan.Replicas() <= fewest);
      fewest = plan.Replicas();
    }
  }
}

int64_t LocalTokens(const Plan& plan, const std::vector<int32_t>& counts) {
  const size_t num_experts = plan.quota.size() / plan.num_ranks;
  int64_t local = 0;
  for (size_t i = 0; i < plan.quota.size(); ++i) {
    local += std::min(plan.quota[i], counts[i % plan.num_ranks * num_experts + i / plan.num_ranks]);
  }
  return local;
}

void CountsBringReplicasToTheirTokens() {
  std::mt19937 random(6);
  const auto tokens = Skewed(random, 8, 4, 1e4);
  std::vector<int32_t> counts(8 * tokens.size(), 0);  // each expert's tokens on one rank
  for (size_t expert = 0; expert < tokens.size(); ++expert)
    counts[random() % 8 * tokens.size() + expert] = tokens[expert];
  ExactOptions options;
  options.eps = 0.1;
  const Plan blind = Make(tokens, 8, 6, options);
  options.counts = {counts.data(), 8, tokens.size()};
  const Plan plan = Make(tokens, 8, 6, options);
  ExpectLegal(plan, tokens);
  EXPECT_EQ(plan.Replicas(), blind.Replicas());
  EXPECT(plan.MaxLoad() <= 1.1 * static_cast<double>(Make(tokens, 8, 6).MaxLoad()));
  EXPECT(LocalTokens(plan, counts) > LocalTokens(blind, counts));
}

void AnythingGivesALegalPlan() {
  std::mt19937 random(7);
  for (int round = 0; round < 2000; ++round) {
    const size_t num_ranks = 1 + random() % 12;
    const size_t home_experts = 1 + random() % 4;
    const size_t slots = home_experts + random() % (std::min<size_t>(num_ranks * home_experts - home_experts, 3) + 1);
    auto tokens = Skewed(random, num_ranks, home_experts, std::pow(10, random() % 6));
    for (int32_t& count : tokens) count = random() % 4 == 0 ? 0 : count;
    ExactOptions options;
    options.eps = static_cast<double>(random() % 3) / 20;
    options.max_fan_out = random() % 4 == 0 ? static_cast<int64_t>(random() % 3) : 100;
    const Plan plan = Make(tokens, num_ranks, slots, options);
    ExpectLegal(plan, tokens, static_cast<size_t>(options.max_fan_out));
    EXPECT(plan.placement == Make(tokens, num_ranks, slots, options).placement);
  }
}

std::string Error(const std::vector<int32_t>& tokens, size_t num_ranks, size_t slots,
                  const ExactOptions& options = {}) {
  std::vector<int32_t> placement(num_ranks * slots);
  std::vector<int32_t> quota(tokens.size() * num_ranks);
  return Exact({tokens.data(), tokens.size()}, options, {placement.data(), num_ranks, slots},
               {quota.data(), tokens.size(), num_ranks})
      .value_or("");
}

void BadArgumentsAreNamed() {
  EXPECT_EQ(Error({1, 2, 3}, 2, 2), "tokens has 3 experts; expected a positive multiple of the 2 ranks");
  EXPECT_EQ(Error({1, 2, 3, 4}, 2, 1),
            "placement has 1 slots per rank; expected 2, the home experts, to 4, all experts");
  EXPECT_EQ(Error({1, 2, 3, 4}, 2, 5),
            "placement has 5 slots per rank; expected 2, the home experts, to 4, all experts");
  EXPECT_EQ(Error({1, -2}, 2, 2), "tokens of expert 1 is -2; expected at least 0");
  EXPECT_EQ(Error({INT32_MAX, 1}, 2, 2), "tokens sum to 2147483648; expected at most 2147483647");
  ExactOptions options;
  options.eps = -0.5;
  EXPECT_EQ(Error({1, 2}, 2, 2, options), "eps is -0.5; expected a finite number, at least 0");
  options.eps = std::nan("");
  EXPECT_EQ(Error({1, 2}, 2, 2, options), "eps is nan; expected a finite number, at least 0");
  options.eps = 0;
  options.max_fan_out = -1;
  EXPECT_EQ(Error({1, 2}, 2, 2, options), "max_fan_out is -1; expected at least 0");
  options.max_fan_out = 1;
  const std::vector<int32_t> counts = {1, 1, 0, 2};
  options.counts = {counts.data(), 2, 2};
  EXPECT_EQ(Error({1, 2}, 2, 2, options), "counts of expert 1 sum to 3; expected at most its 2 tokens");
  options.counts = {counts.data(), 1, 4};
  EXPECT_EQ(Error({1, 2}, 2, 2, options), "counts has shape [1, 4]; expected [2, 2]");
}

}  // namespace
}  // namespace moe_lb

int main() {
  using namespace moe_lb;
  AHotExpertIsSpreadEvenly();
  ADonorMayGiveMoreThanItsSurplusAndRefill();
  BalancedOrEmptyNeedsNoReplica();
  RoomForAnythingIsTakenAtOnce();
  TokensUpToTheLargestInteger();
  NoSenderExceedsItsFanOut();
  LevelIsTheBestQuotaOfAPlacement();
  BothEvaluatorsAgree();
  SmallCasesAreSolvedToTheOptimum();
  EpsTradesLoadForReplicas();
  CountsBringReplicasToTheirTokens();
  AnythingGivesALegalPlan();
  BadArgumentsAreNamed();
}
