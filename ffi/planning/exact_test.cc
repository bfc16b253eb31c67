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
#include "ffi/planning/greedy.h"
#include "ffi/planning/one_pass.h"
#include "ffi/planning/search.h"
#include "ffi/planning/serving.h"
#include "ffi/planning/subset_evaluator.h"
#include "ffi/planning/ultraep.h"

namespace moe_lb {
namespace {

// quota: [E, R].
int64_t MaxLoadOf(const std::vector<int32_t>& quota, size_t num_ranks) {
  std::vector<int64_t> load(num_ranks, 0);
  for (size_t i = 0; i < quota.size(); ++i) load[i % num_ranks] += quota[i];
  return *std::max_element(load.begin(), load.end());
}

struct Plan {
  size_t num_ranks;
  std::vector<int32_t> placement;  // [R, S]
  std::vector<int32_t> quota;      // [E, R]

  size_t slots() const { return placement.size() / num_ranks; }
  int64_t MaxLoad() const { return MaxLoadOf(quota, num_ranks); }
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

void EvaluatorsAgree() {
  std::mt19937 random(3);
  for (int round = 0; round < 50; ++round) {
    const auto num_ranks = static_cast<uint32_t>(2 + random() % 7);
    const auto tokens = Skewed(random, num_ranks, 4, 100);
    const View<const int32_t> view(tokens.data(), tokens.size());
    SubsetEvaluator subset(view, num_ranks);
    FlowEvaluator<1> flow(view, num_ranks, 1);
    FlowEvaluator<2> wide(view, num_ranks, 1);
    std::vector<uint32_t> slot(num_ranks, Swap::kNoExpert);
    for (int step = 0; step < 60; ++step) {
      const auto rank = static_cast<uint32_t>(random() % num_ranks);
      const auto expert = static_cast<uint32_t>(random() % tokens.size());
      const auto threshold = static_cast<int32_t>(random() % 200);
      if (expert / 4 == rank || expert == slot[rank]) continue;
      const Swap swap = {rank, slot[rank], expert};
      EXPECT_EQ(subset.Keeps(swap, threshold), flow.Keeps(swap, threshold));
      EXPECT_EQ(subset.Keeps(swap, threshold), wide.Keeps(swap, threshold));
      subset.Commit(swap);
      flow.Commit(swap);
      wide.Commit(swap);
      slot[rank] = expert;
      EXPECT_EQ(subset.MaxLoad(), flow.MaxLoad());
      if (step % 5 == 0) {
        const int32_t limit = subset.MaxLoad() - static_cast<int32_t>(random() % 30);
        subset.SetLimit(limit);
        flow.SetLimit(limit);
        wide.SetLimit(limit);
      }
      EXPECT_EQ(subset.worst(), flow.worst());
      if (subset.worst() > 0) EXPECT(subset.cut() == flow.cut());
      for (uint32_t r = 0; r < num_ranks; ++r) EXPECT_EQ(flow.cut().Has(r), wide.cut().Has(r));
    }
  }
}

// The search is the same for sets of one and of more words.
void SetsOfMoreWordsGiveTheSamePlacement() {
  std::mt19937 random(8);
  for (int round = 0; round < 10; ++round) {
    const size_t num_ranks = 20 + random() % 20;
    const auto tokens = Skewed(random, num_ranks, 2, 1000);
    const View<const int32_t> view(tokens.data(), tokens.size());
    FlowEvaluator<1> narrow(view, num_ranks, 1);
    FlowEvaluator<4> wide(view, num_ranks, 1);
    const auto by_one = Search<1>(view, num_ranks, 1, 2, narrow).Run({}, 0, {200, 5});
    const auto by_four = Search<4>(view, num_ranks, 1, 2, wide).Run({}, 0, {200, 5});
    EXPECT(!by_one.empty());
    EXPECT_EQ(by_one.size(), by_four.size());
    for (size_t i = 0; i < by_one.size(); ++i) {
      EXPECT_EQ(by_one[i].expert, by_four[i].expert);
      EXPECT_EQ(by_one[i].rank, by_four[i].rank);
    }
  }
}

// Half of the experts are hot and the slots of the other ranks take half of the surplus: the optimum is 1.5. A chain
// under the mean levels 32 ranks and leaves as many at 2.
void LoadsOutOfReachAreSharedByAllRanks() {
  std::vector<int32_t> tokens(1024, 0);
  std::fill(tokens.begin(), tokens.begin() + 512, 64 * 128);
  const Plan plan = Make(tokens, 128, 10);
  ExpectLegal(plan, tokens);
  EXPECT_EQ(plan.MaxLoad(), 3 * (Sum(tokens) / 128) / 2);
}

// The plan at home as an operand of planners that edit a plan.
struct Home {
  size_t num_ranks;
  std::vector<int32_t> placement, quota;

  Home(const std::vector<int32_t>& tokens, size_t ranks, size_t slots)
      : num_ranks(ranks), placement(ranks * slots, -1), quota(tokens.size() * ranks, 0) {
    const size_t home_experts = tokens.size() / ranks;
    for (size_t expert = 0; expert < tokens.size(); ++expert) {
      const size_t rank = expert / home_experts;
      placement[rank * slots + expert % home_experts] = static_cast<int32_t>(expert);
      quota[expert * ranks + rank] = tokens[expert];
    }
  }

  template <typename Planner>
  Home Edit(const Planner& planner) const {
    Home edited = *this;
    const size_t slots = placement.size() / num_ranks, experts = quota.size() / num_ranks;
    const Status bad = planner(MatrixView<const int32_t>(placement.data(), num_ranks, slots),
                               MatrixView<const int32_t>(quota.data(), experts, num_ranks),
                               MatrixView<int32_t>(edited.placement.data(), num_ranks, slots),
                               MatrixView<int32_t>(edited.quota.data(), experts, num_ranks));
    EXPECT_EQ(bad.value_or(""), "");
    return edited;
  }

  Home Greedily() const {
    return Edit([this](auto p, auto q, auto new_p, auto new_q) {
      return Greedy(p, q, {static_cast<int64_t>(num_ranks), 1}, new_p, new_q);
    });
  }

  Home AsUltraEp(int64_t floor) const {
    return Edit([this, floor](auto p, auto q, auto new_p, auto new_q) {
      return UltraEp(p, q, {static_cast<int64_t>(num_ranks), 0.01f, floor}, new_p, new_q);
    });
  }

  int64_t MaxLoad() const { return MaxLoadOf(quota, num_ranks); }
};

void ExpectSame(const Serving& pass, const Home& plan) {
  std::vector<int32_t> quota(plan.quota.size(), 0);
  for (uint32_t entry = 0; entry < pass.num_entries(); ++entry) {
    quota[pass.expert(entry) * plan.num_ranks + pass.rank(entry)] += pass.tokens(entry);
  }
  EXPECT(quota == plan.quota);
}

void OnePassesMakeThePlansOfTheirPlanners() {
  std::mt19937 random(9);
  int by_first_attempt = 0;
  for (int round = 0; round < 300; ++round) {
    const size_t num_ranks = 2 + random() % 20, home = 1 + random() % 5, slots = 1 + random() % 3;
    auto tokens = Skewed(random, num_ranks, home, std::pow(10, random() % 5));
    if (round % 3 == 0) {
      for (int32_t& count : tokens) count = static_cast<int32_t>(random() % 4);  // many ties
    }
    const Home start(tokens, num_ranks, home + std::min(slots, (num_ranks - 1) * home));
    const auto ranks = static_cast<int64_t>(num_ranks);
    const auto mean = static_cast<int32_t>((Sum(tokens) + ranks - 1) / ranks);
    Serving serving({tokens.data(), tokens.size()}, num_ranks);
    OnePass pass(num_ranks, std::min(slots, (num_ranks - 1) * home), SIZE_MAX);
    pass.FillGreedy(serving, mean);
    ExpectSame(serving, start.Greedily());
    pass.FillUltraEp(serving, mean);
    // If the first attempt fails, UltraEP tries other limits.
    if (serving.MaxLoad() > 1.01 * mean + 1) continue;
    ExpectSame(serving, start.AsUltraEp(1 << 20));
    ++by_first_attempt;
  }
  EXPECT(by_first_attempt > 100);
}

// Equal hot experts, hot groups of ranks, stages, one expert with most tokens, and primes.
std::vector<int32_t> Family(std::mt19937& random, size_t family, size_t num_ranks, size_t home) {
  std::vector<int32_t> tokens;
  std::lognormal_distribution<double> noise(0, 0.3);
  for (size_t expert = 0; expert < num_ranks * home; ++expert) {
    const size_t rank = expert / home;
    double amount = 1000 * noise(random);
    if (family == 0) amount = 2 * expert < num_ranks * home ? 4096 : 0;
    if (family == 1) amount *= rank / 4 % 3 == 0 ? 6 : 1;
    if (family == 2) amount *= std::pow(2, 4 * rank / num_ranks);
    if (family == 3 && expert == 3) amount = 1500 * static_cast<double>(num_ranks * home);
    if (family == 4) amount = static_cast<double>(7 * (num_ranks * home - expert) + expert * expert % 11);
    tokens.push_back(static_cast<int32_t>(amount));
  }
  return tokens;
}

void NeverAboveGreedyAndUltraEp() {
  std::mt19937 random(10);
  for (const size_t num_ranks : std::vector<size_t>{8, 16, 64, 72, 96, 128, 256}) {
    for (size_t family = 0; family < 5; ++family) {
      const size_t home = num_ranks == 256 ? 2 : 4 + family % 2 * 4, slots = home + 1 + random() % 2;
      const auto tokens = Family(random, family, num_ranks, home);
      const Plan plan = Make(tokens, num_ranks, slots);
      ExpectLegal(plan, tokens);
      const Home start(tokens, num_ranks, slots);
      EXPECT(plan.MaxLoad() <= start.Greedily().MaxLoad());
      EXPECT(plan.MaxLoad() <= start.AsUltraEp(1).MaxLoad());
      EXPECT(plan.MaxLoad() <= start.AsUltraEp(1000).MaxLoad());
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

// A brief plan ends within `eps` of the mean, and under a limit of replicas it is not far above a whole one.
void BriefPlansAreAlmostAsLevel() {
  std::mt19937 random(9);
  double brief_sum = 0, whole_sum = 0;
  for (int round = 0; round < 100; ++round) {
    const size_t num_ranks = round % 2 == 0 ? 8 : 24;
    const auto tokens = Skewed(random, num_ranks, 4, 1e4);
    const double mean = static_cast<double>(Sum(tokens)) / static_cast<double>(num_ranks);
    ExactOptions options;
    options.eps = 0.01;
    options.max_fan_out = round % 4 / 2 + 1;
    const Plan whole = Make(tokens, num_ranks, 6, options);
    options.brief = true;
    const Plan brief = Make(tokens, num_ranks, 6, options);
    ExpectLegal(brief, tokens, static_cast<size_t>(options.max_fan_out));
    brief_sum += brief.MaxLoad() / mean;
    whole_sum += whole.MaxLoad() / mean;
  }
  EXPECT(brief_sum <= 1.01 * whole_sum);
}

int64_t LocalTokens(const Plan& plan, const std::vector<int32_t>& counts) {
  const size_t num_experts = plan.quota.size() / plan.num_ranks;
  int64_t local = 0;
  for (size_t i = 0; i < plan.quota.size(); ++i) {
    local += std::min(plan.quota[i], counts[i % plan.num_ranks * num_experts + i / plan.num_ranks]);
  }
  return local;
}

// Replicas change places within the lowest maximum, which few loads leave room for.
void CountsBringReplicasToTheirTokens() {
  std::mt19937 random(6);
  int gained = 0;
  for (int round = 0; round < 30; ++round) {
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
    EXPECT_EQ(plan.MaxLoad(), blind.MaxLoad());
    EXPECT(LocalTokens(plan, counts) >= LocalTokens(blind, counts));
    gained += LocalTokens(plan, counts) > LocalTokens(blind, counts);
  }
  EXPECT(gained > 3);
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
    options.brief = random() % 4 == 0;
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
  EvaluatorsAgree();
  SetsOfMoreWordsGiveTheSamePlacement();
  LoadsOutOfReachAreSharedByAllRanks();
  OnePassesMakeThePlansOfTheirPlanners();
  NeverAboveGreedyAndUltraEp();
  SmallCasesAreSolvedToTheOptimum();
  EpsTradesLoadForReplicas();
  BriefPlansAreAlmostAsLevel();
  CountsBringReplicasToTheirTokens();
  AnythingGivesALegalPlan();
  BadArgumentsAreNamed();
}
