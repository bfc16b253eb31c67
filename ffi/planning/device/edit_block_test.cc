// The planners of one block that edit a plan, and the one of relays, against those of CPUs; see exact_block_test.cc.
//
//   edit_block_test [number of random plans] [seed]
#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/common/testing.h"
#include "ffi/planning/device/block_testing.h"
#include "ffi/planning/device/relay.h"
#include "ffi/planning/device/run_on_fibers.h"
#include "ffi/planning/device/ultraep.h"
#include "ffi/planning/ultraep.h"

namespace moe_lb::device {
namespace {

enum class Kind { kUltraEp, kRelay };

struct Case {
  Kind kind;
  int num_ranks, home, slots, domain;  // slots: all of a rank
  std::vector<int32_t> placement, quota;
  UltraEpOptions options;  // the domain is above
  RelayOptions relay;      // the home experts are above

  size_t ranks() const { return static_cast<size_t>(num_ranks); }
  size_t experts() const { return static_cast<size_t>(num_ranks * home); }
  MatrixView<const int32_t> Placement() const { return {placement.data(), ranks(), static_cast<size_t>(slots)}; }
  UltraEpOptions Options() const {
    UltraEpOptions all = options;
    all.domain = domain;
    return all;
  }
  RelayOptions Relays() const {
    RelayOptions all = relay;
    all.num_home = home;
    return all;
  }
  MatrixView<const int32_t> Quota() const { return {quota.data(), experts(), ranks()}; }
};

// The relays of a plan are in its placement.
struct Plan {
  int32_t status = -1;
  std::vector<int32_t> placement, quota;

  explicit Plan(const Case& c) : placement(c.placement.size(), -7), quota(c.quota.size(), -7) {}
};

Plan OnHost(const Case& c) {
  Plan plan(c);
  const MatrixView<int32_t> placement = {plan.placement.data(), c.ranks(), static_cast<size_t>(c.slots)};
  const MatrixView<int32_t> quota = {plan.quota.data(), c.experts(), c.ranks()};
  Status bad;
  if (c.kind == Kind::kUltraEp) {
    bad = UltraEp(c.Placement(), c.Quota(), c.Options(), placement, quota);
  }
  if (c.kind == Kind::kRelay) bad = Relay(c.Placement(), c.Relays(), placement);
  plan.status = bad ? 1 : 0;
  return plan;
}

Plan OnBlock(Fibers& block, const Case& c) {
  Plan plan(c);
  const MatrixView<int32_t> placement = {plan.placement.data(), c.ranks(), static_cast<size_t>(c.slots)};
  const EditCall edit =
      EditOf(c.Placement(), c.Quota(), c.domain, placement, {plan.quota.data(), c.experts(), c.ranks()}, &plan.status);
  if (c.kind == Kind::kUltraEp) RunOnFibers<UltraEpPlanner>(block, UltraEpCall{edit, c.Options()});
  if (c.kind == Kind::kRelay) {
    RunOnFibers<RelayPlanner>(block, RelayOf(c.Placement(), c.Relays(), placement, &plan.status));
  }
  return plan;
}

bool Equal(const Plan& a, const Plan& b) {
  return a.status == b.status && (a.status != 0 || (a.placement == b.placement && a.quota == b.quota));
}

// Replicas of earlier balancers in some of the slots, also of other domains' experts, none twice on a rank.
void PlaceReplicas(std::mt19937& random, int percent, Case* c) {
  for (int rank = 0; rank < c->num_ranks; ++rank) {
    const auto row = c->placement.begin() + rank * c->slots;
    for (int place = c->home; place < c->slots; ++place) {
      if (Pick(random, 1, 100) > percent) continue;
      // Few experts have most replicas, so that some have enough for relays.
      const int number = Pick(random, 0, c->num_ranks * c->home - 1);
      const int expert = random() % 2 == 0 ? number : number % c->home;
      if (std::find(row, row + place, expert) == row + place) *(row + place) = expert;
    }
  }
}

// Most tokens are at home; of experts with replicas, some are there.
void Serve(std::mt19937& random, Case* c) {
  const std::vector<int32_t> counts = Skewed(random, c->num_ranks, c->home, std::pow(10, Pick(random, 0, 6)));
  const int experts = c->num_ranks * c->home;
  c->quota.assign(c->experts() * c->ranks(), 0);
  const auto at = [&](int expert, int rank) -> int32_t& {
    return c->quota[static_cast<size_t>(expert * c->num_ranks + rank)];
  };
  for (int expert = 0; expert < experts; ++expert) {
    for (int rank = 0; rank < c->num_ranks; ++rank) {
      at(expert, expert / c->home) += counts[static_cast<size_t>(rank * experts + expert)];
    }
  }
  for (int rank = 0; rank < c->num_ranks; ++rank) {
    for (int place = c->home; place < c->slots; ++place) {
      const int expert = c->placement[static_cast<size_t>(rank * c->slots + place)];
      if (expert < 0 || random() % 2 == 0) continue;
      const int32_t moved = at(expert, expert / c->home) / Pick(random, 1, 3);
      at(expert, expert / c->home) -= moved;
      at(expert, rank) += moved;
    }
  }
}

Case RandomCase(std::mt19937& random, Kind kind) {
  Case c = {};
  c.kind = kind;
  const int size = Pick(random, 0, 19);
  c.domain = size == 0 ? Pick(random, 33, 128) : size < 6 ? Pick(random, 9, 32) : Pick(random, 1, 8);
  c.num_ranks = c.domain * (size > 12 ? Pick(random, 1, 3) : 1);
  if (kind == Kind::kRelay) c.num_ranks = std::min(c.num_ranks, kMaxRanks);
  c.home = size == 13 ? Pick(random, 33, 40) : Pick(random, 1, c.domain > 8 ? 4 : 8);
  c.slots = c.home + (size == 14 ? Pick(random, 33, 36) : Pick(random, 0, 6));
  c.placement.assign(c.ranks() * static_cast<size_t>(c.slots), -1);
  for (int expert = 0; expert < c.num_ranks * c.home; ++expert) {
    c.placement[static_cast<size_t>(expert / c.home * c.slots + expert % c.home)] = expert;
  }
  PlaceReplicas(random, kind == Kind::kRelay ? 100 : Pick(random, 0, 2) * 30, &c);
  Serve(random, &c);
  c.options.min_tokens = random() % 2 == 0 ? 1 : int64_t{1} << Pick(random, 0, 40);
  c.options.eps = std::vector<float>{0, 0.01f, 0.01f, 0.3f, 1}[random() % 5];
  c.relay = {0, Pick(random, 2, 6), Pick(random, 1, 9), Pick(random, 1, 3)};
  return c;
}

std::string Describe(const Case& c) {
  return "kind " + std::to_string(static_cast<int>(c.kind)) + ", " + std::to_string(c.num_ranks) + " ranks, domain " +
         std::to_string(c.domain) + ", home " + std::to_string(c.home) + ", slots " + std::to_string(c.slots);
}

void ExpectPlanOfHost(Fibers& block, const Case& c) {
  const Plan expected = OnHost(c), plan = OnBlock(block, c);
  if (!block.faults().empty() || !Equal(expected, plan)) {
    std::fprintf(stderr, "%s: status %d, expected %d\n", Describe(c).c_str(), plan.status, expected.status);
    for (const std::string& fault : block.faults()) std::fprintf(stderr, "  %s\n", fault.c_str());
  }
  EXPECT(block.faults().empty());
  EXPECT(Equal(expected, plan));
  block.ForgetFaults();
}

void RandomPlansGiveThePlanOfTheHost(Kind kind, int64_t number, uint32_t seed) {
  std::mt19937 random(seed);
  Fibers block(1 << 20);
  for (int64_t i = 0; i < number; ++i) {
    block.order = std::vector<Order>{Order::kAscending, Order::kDescending, Order::kRandom}[static_cast<size_t>(i % 3)];
    ExpectPlanOfHost(block, RandomCase(random, kind));
  }
}

// Of equal experts and slots the first is taken, also of those that one thread compares, which are 256 apart.
void TiesGiveThePlanOfTheHost(Kind kind) {
  struct Size {
    int ranks, home, replicas;
  };
  std::mt19937 random(5);
  Fibers block(1 << 20);
  for (const Size& size : {Size{2, 300, 270}, Size{3, 40, 3}, Size{8, 4, 3}}) {
    for (const int percent : {0, 100}) {
      Case c = RandomCase(random, kind);
      c.num_ranks = c.domain = size.ranks;
      c.home = size.home;
      c.slots = size.home + size.replicas;
      c.placement.assign(c.ranks() * static_cast<size_t>(c.slots), -1);
      c.quota.assign(c.experts() * c.ranks(), 0);
      for (int expert = 0; expert < size.ranks * size.home; ++expert) {
        const int rank = expert / size.home;
        c.placement[static_cast<size_t>(rank * c.slots + expert % size.home)] = expert;
        c.quota[static_cast<size_t>(expert * size.ranks + rank)] = rank == 0 || random() % 4 == 0 ? 7 : 0;
      }
      PlaceReplicas(random, percent, &c);
      c.options.min_tokens = 1;
      c.options.eps = 0.01f;
      ExpectPlanOfHost(block, c);
    }
  }
}

// Tokens at home, and empty slots.
Case CaseOf(int num_ranks, int slots, const std::vector<int32_t>& tokens) {
  Case c = {};
  c.kind = Kind::kUltraEp;
  c.num_ranks = c.domain = num_ranks;
  c.home = static_cast<int>(tokens.size()) / num_ranks;
  c.slots = c.home + slots;
  c.placement.assign(c.ranks() * static_cast<size_t>(c.slots), -1);
  c.quota.assign(c.experts() * c.ranks(), 0);
  for (size_t expert = 0; expert < tokens.size(); ++expert) {
    const size_t home = static_cast<size_t>(c.home), rank = expert / home;
    c.placement[rank * static_cast<size_t>(c.slots) + expert % home] = static_cast<int32_t>(expert);
    c.quota[expert * c.ranks() + rank] = tokens[expert];
  }
  return c;
}

void UltraEpTriesTheLimitsOfTheHost() {
  Fibers block(1 << 20);
  // The first limit is the largest load rounded to float32, which is one token less.
  Case rounded = CaseOf(2, 1, {(1 << 24) + 1, 5592405});
  rounded.options.min_tokens = 1;
  rounded.options.eps = 0.5f;
  ExpectPlanOfHost(block, rounded);
  // A limit above one that succeeds fails, as surpluses are below the floor, so that the order of limits matters.
  Case floored = CaseOf(4, 1, {20, 0, 0, 0, 0, 0, 46, 53});
  floored.options.min_tokens = 7;
  floored.options.eps = 0;
  ExpectPlanOfHost(block, floored);
}

// An illegal entry anywhere is refused by every block; at the limit of tokens the plan is made.
void RefusedPlansSetTheStatus(Kind kind) {
  std::mt19937 random(3);
  Fibers block(1 << 20);
  for (int i = 0; i < 40; ++i) {
    Case c = RandomCase(random, kind);
    const std::vector<int32_t> wrong = {-2, INT32_MIN, INT32_MAX, c.num_ranks * c.home, 0};
    c.placement[random() % c.placement.size()] = wrong[random() % wrong.size()];
    ExpectPlanOfHost(block, c);
  }
  if (kind == Kind::kRelay) return;
  for (int i = 0; i < 20; ++i) {
    Case c = RandomCase(random, kind);
    int64_t sum = 0;
    for (const int32_t tokens : c.quota) sum += tokens;
    const size_t place = random() % c.quota.size();
    c.quota[place] += static_cast<int32_t>(INT32_MAX - sum);
    EXPECT_EQ(OnHost(c).status, 0);
    ExpectPlanOfHost(block, c);
    c.quota[random() % c.quota.size()] += c.quota.size() == 1 ? -INT32_MAX - 1 : 1;
    if (std::find(c.quota.begin(), c.quota.end(), INT32_MIN) == c.quota.end()) ExpectPlanOfHost(block, c);
    c.quota[place] = -1;
    EXPECT_EQ(OnBlock(block, c).status, 1);
    ExpectPlanOfHost(block, c);
  }
}

// Loads of DeepSeek-V3's size, at the default options, which use all shared memory of an A100 but no more.
void LargePlansGiveThePlanOfTheHost(Kind kind) {
  std::mt19937 random(2);
  Fibers block(kSharedBytes);
  for (const int num_ranks : {8, 32, 64}) {
    Case c = RandomCase(random, kind);
    c.num_ranks = c.domain = num_ranks;
    c.home = 256 / num_ranks;
    c.slots = c.home + 2;
    c.placement.assign(c.ranks() * static_cast<size_t>(c.slots), -1);
    for (int expert = 0; expert < 256; ++expert) {
      c.placement[static_cast<size_t>(expert / c.home * c.slots + expert % c.home)] = expert;
    }
    PlaceReplicas(random, kind == Kind::kRelay ? 100 : 0, &c);
    Serve(random, &c);
    c.options.min_tokens = 1024;
    c.options.eps = 0.01f;
    c.relay = {};
    ExpectPlanOfHost(block, c);
  }
}

// Calls of one rank with two experts, at the sizes that fill the shared memory, and those of the most ranks.
void TheLargestPlansFit() {
  const auto plan = [](int ranks, int experts, int slots) {
    EditCall call = {};
    call.all_ranks = call.num_ranks = ranks;
    call.all_experts = experts;
    call.slots = slots;
    return call;
  };
  const auto ultraep_fits = [&](int ranks, int experts, int slots) {
    UltraEpCall call = {};
    call.plan = plan(ranks, experts, slots);
    return Fit(call);
  };
  EXPECT(ultraep_fits(1, 2, 3792) && !ultraep_fits(1, 2, 3793));
  EXPECT(ultraep_fits(128, 128, 2) && !ultraep_fits(129, 129, 2));
  EXPECT(ultraep_fits(2, 4, 2) && !ultraep_fits(2, 4, 1));
  const auto relay_fits = [](int ranks, int home, int slots) {
    RelayCall call = {};
    call.num_ranks = ranks;
    call.home = home;
    call.slots = slots;
    return Fit(call);
  };
  EXPECT(relay_fits(1, 4, 20854) && !relay_fits(1, 4, 20855));
  EXPECT(relay_fits(128, 1, 2) && !relay_fits(129, 1, 2));
}

void EveryBarrierIsNeeded(Kind kind) {
  std::mt19937 random(4);
  std::vector<Case> cases;
  for (int i = 0; i < 60; ++i) cases.push_back(RandomCase(random, kind));
  Fibers block(1 << 20);
  std::vector<std::function<bool()>> checks;
  for (const Case& c : cases) {
    checks.push_back([&] {
      const Plan plan = OnBlock(block, c);
      return block.faults().empty() && Equal(OnHost(c), plan);
    });
  }
  EXPECT(ExpectEveryBarrierIsNeeded(block, checks) > 2);
}

void QuotientsAreThoseOfDivisions() {
  std::vector<int> divisors = {999, 4095, 4096, 32767, 65535, 65536};
  for (int by = 1; by < 300; ++by) divisors.push_back(by);
  for (const int by : divisors) {
    const Divisor divisor(by);
    for (int number = 0; number < 1 << 16; ++number) EXPECT(divisor.Quotient(number) == number / by);
  }
}

// Threads that add to a place without a barrier agree; a thread that only reads or writes it needs one.
void AtomicAccessesNeedNoBarrierBetweenThem() {
  for (const int kind : {0, 1, 2, 3}) {
    Fibers block(64);
    int32_t sum = 0;
    block.Run([&](const FiberThreads& t) {
      const auto array = t.Shared<int32_t>(0, 1);
      if (t.thread() == 0) array[0] = 0;
      if (kind != 1) t.SyncBlock();
      t.AddAt(array, 0, t.thread());
      if (kind == 2 && t.thread() == 77) array[0] = 1;
      if (kind != 3) t.SyncBlock();
      if (t.thread() == 5) sum = array[0];
    });
    EXPECT_EQ(block.faults().empty(), kind == 0);
    if (kind == 0) EXPECT_EQ(sum, kThreads * (kThreads - 1) / 2);
  }
}

void ThreadsOfTheSystemRunBlocksAtOnce() {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([] {
      Fibers block(64);
      for (int run = 0; run < 100; ++run) {
        block.Run([](const FiberThreads& t) {
          EXPECT_EQ(t.Sum(1), 32u);
          t.SyncBlock();
        });
        EXPECT(block.faults().empty());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace moe_lb::device

int main(int argc, char** argv) {
  using namespace moe_lb::device;
  const bool is_counted = argc > 1 && std::isdigit(argv[1][0]) != 0;
  const int64_t number = is_counted ? std::atoll(argv[1]) : 400;
  const uint32_t seed = argc > 2 ? static_cast<uint32_t>(std::atoi(argv[2])) : 1;
  moe_lb::TestParts parts = {{"atomic", AtomicAccessesNeedNoBarrierBetweenThem},
                             {"threads", ThreadsOfTheSystemRunBlocksAtOnce},
                             {"largest", TheLargestPlansFit},
                             {"quotients", QuotientsAreThoseOfDivisions},
                             {"ultraep_limits", UltraEpTriesTheLimitsOfTheHost}};
  const std::map<std::string, Kind> kinds = {{"ultraep", Kind::kUltraEp}, {"relay", Kind::kRelay}};
  for (const auto& [name, kind] : kinds) {
    parts.emplace_back(name, [=, kind = kind] {
      RandomPlansGiveThePlanOfTheHost(kind, number, seed);
      RefusedPlansSetTheStatus(kind);
    });
    parts.emplace_back(name + "_ties", [kind = kind] { TiesGiveThePlanOfTheHost(kind); });
    parts.emplace_back(name + "_large", [kind = kind] { LargePlansGiveThePlanOfTheHost(kind); });
    parts.emplace_back(name + "_barriers", [kind = kind] { EveryBarrierIsNeeded(kind); });
  }
  return moe_lb::RunParts(is_counted ? 1 : argc, argv, parts);
}
