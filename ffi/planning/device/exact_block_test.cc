// The planner of one block against the planner of CPUs, its accesses to shared memory, and each of its barriers.
//
//   exact_block_test [number of random counts] [seed]
#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "ffi/common/testing.h"
#include "ffi/planning/device/block_testing.h"
#include "ffi/planning/device/exact.h"
#include "ffi/planning/device/run_on_fibers.h"
#include "ffi/planning/exact_domains.h"
#include "ffi/planning/flow_evaluator.h"
#include "ffi/planning/search.h"
#include "ffi/planning/subset_evaluator.h"

namespace moe_lb::device {
namespace {

struct Case {
  int num_ranks, home, slots, domain;  // slots: of replicas
  double eps;
  int64_t fan_out;
  bool localize, keeps_counts;
  std::vector<int32_t> counts;
  std::vector<int32_t> limits = {INT32_MAX};  // of each plan
  bool brief = false;

  size_t ranks() const { return static_cast<size_t>(num_ranks); }
  size_t experts() const { return static_cast<size_t>(num_ranks * home); }
  size_t all_slots() const { return static_cast<size_t>(home + slots); }
  Shape shape() const { return {domain, domain * home, home, std::min(slots, (domain - 1) * home)}; }
};

struct Plan {
  int32_t status = -1;
  std::vector<int32_t> placement, quota;
};

// A limit is one of slots and of the fan-out. The slots above it are empty, and a plan under one that binds is brief.
Plan OnHost(const Case& c) {
  const size_t amounts = c.experts() * c.ranks();
  Plan plan = {0, {}, std::vector<int32_t>(c.limits.size() * amounts)};
  for (size_t number = 0; number < c.limits.size(); ++number) {
    const int limit = std::max(c.limits[number], 0);
    const size_t slots = static_cast<size_t>(c.home + std::min(c.slots, limit));
    std::vector<int32_t> placement(c.ranks() * slots);
    const bool binds = c.limits[number] < std::min<int64_t>(c.fan_out, c.shape().all_slots());
    const Status bad = ExactDomains(
        {c.counts.data(), c.ranks(), c.experts()},
        {c.domain, c.eps, std::min<int64_t>(c.fan_out, limit), c.localize, c.brief || binds},
        {placement.data(), c.ranks(), slots}, {plan.quota.data() + number * amounts, c.experts(), c.ranks()});
    plan.status = bad ? 1 : plan.status;
    for (size_t rank = 0; rank < c.ranks(); ++rank) {
      const auto first = placement.begin() + static_cast<int64_t>(rank * slots);
      plan.placement.insert(plan.placement.end(), first, first + static_cast<int64_t>(slots));
      plan.placement.resize((number * c.ranks() + rank + 1) * c.all_slots(), -1);
    }
  }
  return plan;
}

ExactCall CallOf(const Case& c, Plan* plan) {
  plan->placement.assign(c.limits.size() * c.ranks() * c.all_slots(), -7);
  plan->quota.assign(c.limits.size() * c.experts() * c.ranks(), -7);
  return {c.counts.data(),
          c.limits.data(),
          plan->placement.data(),
          plan->quota.data(),
          &plan->status,
          static_cast<int>(c.limits.size()),
          c.num_ranks,
          c.num_ranks * c.home,
          c.home + c.slots,
          c.shape(),
          c.eps,
          static_cast<int32_t>(std::min<int64_t>(c.fan_out, 1 << 20)),
          c.localize,
          c.brief,
          c.keeps_counts};
}

Plan OnBlock(Fibers& block, const Case& c) {
  Plan plan;
  RunOnFibers<ExactPlanner>(block, CallOf(c, &plan));
  return plan;
}

bool Equal(const Plan& a, const Plan& b) {
  return a.status == b.status && (a.status != 0 || (a.placement == b.placement && a.quota == b.quota));
}

// Mostly few ranks, because a search takes long here.
Case RandomCase(std::mt19937& random) {
  Case c;
  const int kind = Pick(random, 0, 59);
  c.domain = kind == 0                        ? Pick(random, 33, 64)
             : kind == 1 && random() % 4 == 0 ? Pick(random, 65, 128)
             : kind < 20                      ? Pick(random, 9, 32)
                                              : Pick(random, 1, 8);
  c.num_ranks = c.domain * (kind > 40 ? Pick(random, 1, 3) : 1);
  c.home = kind == 30 ? Pick(random, 33, 40) : Pick(random, 1, c.domain > 8 ? 4 : 8);
  c.slots = Pick(random, 0, 4);
  if (kind == 31) c.slots = Pick(random, 33, 36);
  c.eps = std::vector<double>{0, 0, 0.01, 0.01, 0.05, 0.3, 1e300}[random() % 7];
  c.fan_out = random() % 4 == 0 ? Pick(random, 0, 3) : INT64_MAX;
  c.localize = random() % 2 == 0;
  c.keeps_counts = c.localize && random() % 2 == 0;
  c.brief = random() % 8 == 0;
  c.counts = Skewed(random, c.num_ranks, c.home, std::pow(10, Pick(random, 0, 6)));
  if (random() % 4 == 0) c.limits = {Pick(random, 0, 2), INT32_MAX, Pick(random, -1, 4)};
  return c;
}

std::string Describe(const Case& c) {
  return std::to_string(c.num_ranks) + " ranks, domain " + std::to_string(c.domain) + ", home " +
         std::to_string(c.home) + ", slots " + std::to_string(c.slots) + ", eps " + std::to_string(c.eps) +
         ", fan-out " + std::to_string(c.fan_out) + ", localize " + std::to_string(c.localize) + ", plans " +
         std::to_string(c.limits.size());
}

void ExpectPlanOfHost(Fibers& block, const Case& c) {
  const Plan expected = OnHost(c), plan = OnBlock(block, c);
  if (!block.faults().empty() || !Equal(expected, plan)) {
    std::fprintf(stderr, "%s\n", Describe(c).c_str());
    for (const std::string& fault : block.faults()) std::fprintf(stderr, "  %s\n", fault.c_str());
  }
  EXPECT(block.faults().empty());
  EXPECT(Equal(expected, plan));
}

void RandomCountsGiveThePlanOfTheHost(int64_t number, uint32_t seed) {
  std::mt19937 random(seed);
  Fibers block(1 << 20);
  for (int64_t i = 0; i < number; ++i) {
    block.order = std::vector<Order>{Order::kAscending, Order::kDescending, Order::kRandom}[static_cast<size_t>(i % 3)];
    ExpectPlanOfHost(block, RandomCase(random));
  }
}

// Loads of DeepSeek-V3's size, at the default options.
Case LargeCase(std::mt19937& random, int num_ranks, int experts) {
  Case c = {num_ranks, experts / num_ranks, 2, num_ranks, 0.01, INT64_MAX, true, true, {}, {1, INT32_MAX}};
  c.counts = Skewed(random, num_ranks, c.home, 1e4);
  return c;
}

void LargeCountsGiveThePlanOfTheHost() {
  std::mt19937 random(2);
  Fibers block(1 << 20);
  for (const int num_ranks : {16, 32, 64, 128}) ExpectPlanOfHost(block, LargeCase(random, num_ranks, 256));
  ExpectPlanOfHost(block, LargeCase(random, 72, 288));
}

// Of equal experts the first is taken, also of those that different lanes and passes of a warp compare.
void TiesGiveThePlanOfTheHost() {
  std::mt19937 random(6);
  Fibers block(1 << 20);
  for (int i = 0; i < 60; ++i) {
    Case c = RandomCase(random);
    c.num_ranks = c.domain = Pick(random, 2, 6);
    c.home = std::vector<int>{1, 4, 32, 33, 40, 64}[random() % 6];
    c.slots = Pick(random, 1, 3);
    c.counts.clear();
    for (size_t k = 0; k < c.ranks() * c.experts(); ++k) c.counts.push_back(random() % 3 == 0 ? 5 : 0);
    // The first rank has most.
    for (int expert = 0; expert < c.home; ++expert) c.counts[static_cast<size_t>(expert)] = 40;
    ExpectPlanOfHost(block, c);
  }
}

// Known tokens, which all start on the first rank.
Case CaseOf(int num_ranks, int slots, int64_t fan_out, const std::vector<int32_t>& tokens) {
  const int home = static_cast<int>(tokens.size()) / num_ranks;
  Case c = {num_ranks, home, slots, num_ranks, 0, fan_out, false, false, tokens, {INT32_MAX}};
  c.counts.resize(c.ranks() * c.experts());
  return c;
}

// Random counts seldom have a replica of as many tokens as the room of its component.
void ReplicasThatFillTheRoomAreRemoved() {
  Fibers block(1 << 20);
  ExpectPlanOfHost(block, CaseOf(4, 3, INT64_MAX, {0, 0, 0, 0, 0, 0, 2, 1, 0, 3, 1, 3, 2, 3, 0, 3}));
}

// Random counts of so many ranks seldom have a better placement than the rules find.
void DomainsOfMoreThan32RanksAreSearched() {
  std::vector<int32_t> tokens;
  for (int expert = 0; expert < 33; ++expert) tokens.push_back((3 * expert + 2) % 10 * (2 - expert % 2));
  Fibers block(1 << 20);
  ExpectPlanOfHost(block, CaseOf(33, 1, 1, tokens));
}

// Where the search begins to halve tokens.
void TotalsAtTheLimitGiveThePlanOfTheHost() {
  std::mt19937 random(7);
  Fibers block(1 << 20);
  for (int i = 0; i < 30; ++i) {
    Case c = RandomCase(random);
    c.num_ranks = c.domain = Pick(random, 3, 8);
    c.home = Pick(random, 1, 3);
    c.slots = 1;
    c.eps = 0;
    c.counts = Skewed(random, c.num_ranks, c.home, 1e6);
    int64_t sum = 0;
    for (const int32_t count : c.counts) sum += count;
    c.counts[0] += static_cast<int32_t>(std::max<int64_t>(SubsetEvaluator::kMaxTokens - sum, 0));
    ExpectPlanOfHost(block, c);
  }
  // Of just the limit, where halves give another placement.
  const Case c = CaseOf(5, 1, 1, {0, 75037541, 34443465, 7380746, 0, 17221737, 134230, 4, 2, 2});
  EXPECT_EQ(std::accumulate(c.counts.begin(), c.counts.end(), int64_t{0}), SubsetEvaluator::kMaxTokens);
  ExpectPlanOfHost(block, c);
}

void RefusedCountsSetTheStatus() {
  std::mt19937 random(3);
  Fibers block(1 << 20);
  for (const int domain : {2, 4}) {
    Case c = {4, 2, 1, domain, 0, INT64_MAX, false, false, std::vector<int32_t>(32, 5)};
    EXPECT_EQ(OnBlock(block, c).status, 0);
    c.counts[13] = -1;
    ExpectPlanOfHost(block, c);
    c.counts[13] = INT32_MAX - 155;
    EXPECT_EQ(OnBlock(block, c).status, 0);
    ++c.counts[31];
    EXPECT_EQ(OnBlock(block, c).status, 1);
    ExpectPlanOfHost(block, c);
  }
}

void DomainsOf128RanksAreTheLargestThatFit() {
  for (const int ranks : {128, 129}) {
    ExactCall call = {};
    call.all_ranks = ranks;
    call.all_experts = ranks;
    call.all_slots = 2;
    EXPECT_EQ(Fit(&call, ranks), ranks == 128);
  }
}

void OffsetsInGlobalMemoryHave31Bits() {
  constexpr int k15 = 1 << 15, k16 = 1 << 16;
  for (const auto& [ranks, slots] : std::vector<std::pair<int, int>>{{k15, 2}, {k16, 2}, {k15, k16}, {k15, k16 - 1}}) {
    ExactCall call = {};
    call.all_ranks = call.all_experts = ranks;
    call.all_slots = slots;
    EXPECT_EQ(Fit(&call, 8), ranks == k15 && slots != k16);
  }
}

// Sizes that fill the shared memory to the last byte, without and with the counts.
void TheLargestDomainsFit() {
  for (const bool localize : {false, true}) {
    int num_full = 0;
    for (int ranks = 2; ranks <= kMaxRanks; ++ranks) {
      for (int size = 0; size < 8192; ++size) {
        const int home = 1 + size / 128, slots = 1 + size % 128;
        ExactCall call = {};
        call.all_ranks = ranks;
        call.all_experts = ranks * home;
        call.all_slots = home + slots;
        call.eps = localize ? 0 : 0.1;
        call.localize = localize;
        const bool fits = Fit(&call, ranks);
        ExactCall most = call;
        most.keeps_counts = localize;
        num_full += LayOut(most).end == kSharedBytes ? 1 : 0;
        EXPECT_EQ(call.keeps_counts, localize && LayOut(most).end <= kSharedBytes);
        EXPECT_EQ(fits, LayOut(call).end <= kSharedBytes);
        // Without eps there are fewer candidates.
        most.eps = 0.1 - call.eps;
        EXPECT(localize || LayOut(most).end < LayOut(call).end);
      }
    }
    EXPECT(num_full > 0);
  }
}

// A search that starts without replicas, which planners do only if no rule lowers the load.
struct SearchCase {
  Shape shape;
  std::vector<int32_t> tokens;
  int32_t enough;
  Effort effort;
  bool has_flows;  // instead of subsets
};

constexpr size_t kFanOut = 9;

template <int W>
std::vector<uint32_t> SearchOnBlock(Fibers& block, const SearchCase& c) {
  const auto all = static_cast<size_t>(c.shape.all_slots()), experts = c.tokens.size();
  std::vector<uint32_t> found(all, 7);
  block.Run([&](const FiberThreads& t) {
    if (t.warp() > 0) return;
    const auto home = t.Shared<int32_t>(0, experts);
    const auto load = t.Shared<int32_t>(4 * experts, static_cast<size_t>(c.shape.num_ranks));
    for (int e = t.lane(); e < c.shape.num_experts; e += kLanes) home[e] = c.tokens[static_cast<size_t>(e)];
    for (int r = t.lane(); r < c.shape.num_ranks; r += kLanes) {
      int32_t sum = 0;
      for (int i = 0; i < c.shape.home; ++i) sum += c.tokens[static_cast<size_t>(r * c.shape.home + i)];
      load[r] = sum;
    }
    Flow<FiberThreads, W> flow;
    flow.Place(t, c.shape, 4096);
    SearchMemory<FiberThreads, W> memory;
    memory.Place(t, c.shape, 4096 + FlowBytes(c.shape, W));
    Searcher<FiberThreads, W> searcher(t, c.shape, memory, kFanOut);
    searcher.Start(home, 0);
    if (c.has_flows) {
      const int64_t total = std::accumulate(c.tokens.begin(), c.tokens.end(), int64_t{0});
      flow.Reset(t, home, load);
      FlowSwaps<FiberThreads, W> evaluator(t, flow,
                                           static_cast<int32_t>((total + c.shape.num_ranks - 1) / c.shape.num_ranks));
      searcher.Run(evaluator, {}, c.enough, c.effort);
    } else if constexpr (W == 1) {
      Subsets<FiberThreads, 1> evaluator(t, flow, memory.tokens, memory.holders);
      searcher.Run(evaluator, {}, c.enough, c.effort);
    }
    for (int i = t.lane(); i < c.shape.all_slots(); i += kLanes) found[static_cast<size_t>(i)] = memory.best[i];
  });
  return found;
}

std::vector<Replica> FlowSearch(const SearchCase& c) {
  const View<const int32_t> tokens(c.tokens.data(), c.tokens.size());
  const auto ranks = static_cast<size_t>(c.shape.num_ranks), slots = static_cast<size_t>(c.shape.slots);
  FlowEvaluator<2> evaluator(tokens, ranks, slots);
  return Search<2>(tokens, ranks, slots, kFanOut, evaluator).Run({}, c.enough, c.effort);
}

std::vector<Replica> SubsetSearch(const SearchCase& c) {
  const View<const int32_t> tokens(c.tokens.data(), c.tokens.size());
  const auto ranks = static_cast<size_t>(c.shape.num_ranks), slots = static_cast<size_t>(c.shape.slots);
  SubsetEvaluator evaluator(tokens, ranks);
  return Search<1>(tokens, ranks, slots, kFanOut, evaluator).Run({}, c.enough, c.effort);
}

std::vector<uint32_t> SearchOnHost(const SearchCase& c) {
  const auto ranks = static_cast<size_t>(c.shape.num_ranks), slots = static_cast<size_t>(c.shape.slots);
  std::vector<uint32_t> expected(ranks * slots, kNoExpert);
  for (const Replica& replica : c.has_flows ? FlowSearch(c) : SubsetSearch(c)) {
    *std::find(expected.begin() + static_cast<int64_t>(slots * replica.rank), expected.end(),
               static_cast<uint32_t>(kNoExpert)) = replica.expert;
  }
  return expected;
}

template <int W>
bool SearchesAsOnTheHost(Fibers& block, const SearchCase& c) {
  const auto found = SearchOnBlock<W>(block, c);
  return block.faults().empty() && found == SearchOnHost(c);
}

// Small counts have many equal excesses, and short searches end in their last steps.
void SearchesOfEqualCountsGiveThePlacementOfTheHost(int64_t number, uint32_t seed) {
  std::mt19937 random(seed);
  Fibers block(1 << 20);
  for (int64_t i = 0; i < number; ++i) {
    const bool has_flows = i % 2 == 1;
    const int ranks = !has_flows    ? Pick(random, 3, 8)
                      : i % 64 == 1 ? Pick(random, 65, 128)
                      : i % 8 == 1  ? Pick(random, 31, 40)
                                    : Pick(random, 3, 10);
    const int home = Pick(random, 1, ranks > 10 ? 2 : 4);
    const Effort effort = {ranks > 10 ? Pick(random, 1, 20) : Pick(random, 1, 60), 5};
    SearchCase c = {{ranks, ranks * home, home, Pick(random, 1, 2)}, {}, 0, effort, has_flows};
    for (int expert = 0; expert < ranks * home; ++expert) {
      c.tokens.push_back(Pick(random, 0, expert < home || expert % 5 == 0 ? 9 : 2));
    }
    if (ranks > 2 * kLanes) {
      EXPECT(SearchesAsOnTheHost<4>(block, c));
    } else {
      EXPECT(ranks > kLanes ? SearchesAsOnTheHost<2>(block, c) : SearchesAsOnTheHost<1>(block, c));
    }
  }
}

// Loads at the limit are common if counts are small.
void SmallCountsGiveThePlanOfTheHost(int64_t number, uint32_t seed) {
  std::mt19937 random(seed);
  Fibers block(1 << 20);
  for (int64_t i = 0; i < number; ++i) {
    Case c = RandomCase(random);
    c.num_ranks = c.domain = Pick(random, 3, 6);
    c.home = Pick(random, 1, 4);
    c.slots = Pick(random, 1, 3);
    c.localize = true;
    c.eps = i % 2 == 0 ? 0.3 : c.eps;
    c.counts.clear();
    for (size_t k = 0; k < c.ranks() * c.experts(); ++k) c.counts.push_back(Pick(random, 0, k % 4 == 0 ? 6 : 1));
    ExpectPlanOfHost(block, c);
  }
}

void EveryBarrierIsNeeded() {
  std::mt19937 random(4);
  std::vector<Case> cases;
  for (int i = 0; i < 150; ++i) cases.push_back(RandomCase(random));
  Fibers block(1 << 20);
  const SearchCase from_home = {
      {4, 12, 3, 2}, {90, 5, 3, 40, 20, 9, 1, 0, 2, 7, 30, 8}, 54, SubsetEffort(false), false};
  const auto search = [&] { return SearchesAsOnTheHost<1>(block, from_home); };
  std::vector<std::function<bool()>> checks = {search};
  for (const Case& c : cases) {
    checks.push_back([&] {
      const Plan plan = OnBlock(block, c);
      return block.faults().empty() && Equal(OnHost(c), plan);
    });
  }
  EXPECT(ExpectEveryBarrierIsNeeded(block, checks) > 20);
}

}  // namespace
}  // namespace moe_lb::device

int main(int argc, char** argv) {
  using namespace moe_lb::device;
  const bool is_counted = argc > 1 && std::isdigit(argv[1][0]) != 0;
  const int64_t number = is_counted ? std::atoll(argv[1]) : 500;
  const uint32_t seed = argc > 2 ? static_cast<uint32_t>(std::atoi(argv[2])) : 1;
  return moe_lb::RunParts(is_counted ? 1 : argc, argv,
                          {{"random", [=] { RandomCountsGiveThePlanOfTheHost(number, seed); }},
                           {"large", LargeCountsGiveThePlanOfTheHost},
                           {"ties", TiesGiveThePlanOfTheHost},
                           {"limit", TotalsAtTheLimitGiveThePlanOfTheHost},
                           {"room", ReplicasThatFillTheRoomAreRemoved},
                           {"many_ranks", DomainsOfMoreThan32RanksAreSearched},
                           {"search", [=] { SearchesOfEqualCountsGiveThePlacementOfTheHost(300, seed); }},
                           {"small", [=] { SmallCountsGiveThePlanOfTheHost(400, seed); }},
                           {"refused", RefusedCountsSetTheStatus},
                           {"largest", DomainsOf128RanksAreTheLargestThatFit},
                           {"offsets", OffsetsInGlobalMemoryHave31Bits},
                           {"full", TheLargestDomainsFit},
                           {"barriers", EveryBarrierIsNeeded}});
}
