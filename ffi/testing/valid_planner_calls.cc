// Valid calls of the planners.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "ffi/planning/eplb_plus.h"
#include "ffi/planning/exact_domains.h"
#include "ffi/planning/fastermoe.h"
#include "ffi/planning/relay.h"
#include "ffi/planning/spray.h"
#include "ffi/planning/ultraep.h"
#include "ffi/testing/plan_verifiers.h"
#include "ffi/testing/random_placement.h"
#include "ffi/testing/valid_calls.h"

namespace moe_lb::testing {
namespace {

constexpr XLA_FFI_DataType kS32 = XLA_FFI_DataType_S32;

const Array kStatus = Result(kS32, {1});

Call EplbPlus(Random& random) {
  const Placement placement(random);
  const Array tokens = IntsBetween(random, {placement.experts}, 0, 100);
  Call call = {AttributesOf(EplbPlusOptions{placement.domain}), {}, {}};
  call.devices.push_back(
      {{tokens, placement.array},
       {Result(kS32, {placement.ranks, placement.slots}), Result(kS32, {placement.experts, placement.ranks}), kStatus},
       {}});
  return call;
}

// Calls of a planner that edits a plan with the options of `make(random, placement)`.
template <auto make>
Call Edit(Random& random) {
  const Placement placement(random);
  const Array quota = IntsBetween(random, {placement.experts, placement.ranks}, 0, 50);
  Call call = {AttributesOf(make(random, placement)), {}, {}};
  call.devices.push_back({{placement.array, quota},
                          {Result(kS32, {placement.ranks, placement.slots}), Result(kS32, quota.dims), kStatus},
                          {}});
  return call;
}

UltraEpOptions RandomUltraEp(Random& random, const Placement& placement) {
  return {placement.domain, static_cast<float>(random.Below(101)) / 100, random.Between(1, 10)};
}

// No expert twice on a rank.
Call Relay(Random& random) {
  Placement placement(random);
  std::vector<int32_t> values(static_cast<size_t>(placement.ranks * placement.slots), -1);
  for (int64_t rank = 0; rank < placement.ranks; ++rank) {
    int32_t* slots = values.data() + rank * placement.slots;
    for (int64_t slot = 0; slot < placement.slots; ++slot) {
      const int64_t expert = slot < placement.home ? rank * placement.home + slot : random.Below(placement.experts);
      const auto value = static_cast<int32_t>(expert);
      if (std::find(slots, slots + slot, value) == slots + slot) slots[slot] = value;
    }
  }
  const RelayOptions options = {placement.home, random.Between(2, 5), random.Between(1, 9), random.Between(1, 3)};
  Call call = {AttributesOf(options), {}, {}};
  const std::vector<int64_t> shape = {placement.ranks, placement.slots};
  call.devices.push_back({{Ints(shape, values)}, {Result(kS32, shape), kStatus}, {}});
  return call;
}

Call Exact(Random& random) {
  const Placement placement(random);
  const ExactDomainsOptions options = {placement.domain, static_cast<double>(random.Below(20)) / 100,
                                       random.Chance(50) ? random.Below(4) : INT64_MAX, random.Chance(50),
                                       random.Chance(50)};
  Call call = {AttributesOf(options), {}, {}};
  call.devices.push_back(
      {{IntsBetween(random, {placement.ranks, placement.experts}, 0, 50)},
       {Result(kS32, {placement.ranks, placement.slots}), Result(kS32, {placement.experts, placement.ranks}), kStatus},
       {}});
  return call;
}

// A plan for each of several limits.
Call ExactKernel(Random& random) {
  Call call = Exact(random);
  Operands& only = call.devices[0];
  const int64_t plans = random.Between(1, 3);
  only.args.push_back(IntsBetween(random, {plans}, -1, 4));
  for (Array* ret : {&only.rets[0], &only.rets[1]}) *ret = Result(kS32, {plans * ret->dims[0], ret->dims[1]});
  return call;
}

Call FasterMoe(Random& random) {
  const Placement placement(random);
  // FasterMoE copies only experts served by home alone, so all tokens start at home. A random quota would rarely lead
  // to a copy.
  std::vector<int32_t> quota(static_cast<size_t>(placement.experts * placement.ranks), 0);
  const Array counts = IntsBetween(random, {placement.ranks, placement.experts}, 0, 50);
  for (int64_t expert = 0; expert < placement.experts; ++expert) {
    int32_t& at_home = quota[static_cast<size_t>(expert * placement.ranks + expert / placement.home)];
    for (int64_t rank = 0; rank < placement.ranks; ++rank) {
      int32_t tokens;
      std::memcpy(&tokens, counts.bytes.data() + 4 * (rank * placement.experts + expert), 4);
      at_home += tokens;
    }
  }
  Call call = {AttributesOf(FasterMoeOptions{placement.domain, random.Between(1, 10)}), {}, {}};
  call.devices.push_back(
      {{placement.array, Ints({placement.experts, placement.ranks}, quota), counts},
       {Result(kS32, {placement.ranks, placement.slots}), Result(kS32, {placement.experts, placement.ranks}), kStatus},
       {}});
  return call;
}

Call Spray(Random& random) {
  const int64_t rails = random.Between(1, 3);
  const int64_t ranks_per_node = rails * random.Between(1, 2);
  const int64_t ranks = ranks_per_node * random.Between(1, 3);
  std::vector<int32_t> ticks(static_cast<size_t>(rails), 1);
  for (int32_t& tick : ticks) tick = static_cast<int32_t>(random.Below(4));
  // A call with only dead rails fails, so one is alive.
  ticks[0] = 1;
  Call call = {AttributesOf(SprayOptions{ranks_per_node, random.Between(1, 8)}), {}, {}};
  call.devices.push_back({{IntsBetween(random, {ranks, ranks}, 0, 100), Ints({rails}, ticks)},
                          {Result(kS32, {ranks, ranks * rails}), kStatus},
                          {}});
  return call;
}

}  // namespace

std::map<std::string, ValidCalls> ValidPlannerCalls() {
  return {
      {"moe_lb_plan_greedy", {Edit<RandomGreedy>, false, VerifyEdit}},
      {"moe_lb_plan_eplb_plus", {EplbPlus, false, VerifyFill}},
      {"moe_lb_plan_feplb", {Edit<RandomFeplb>, false, VerifyEdit}},
      {"moe_lb_plan_fastermoe", {FasterMoe, false, VerifyEdit}},
      {"moe_lb_plan_ultraep", {Edit<RandomUltraEp>, false, VerifyEdit}},
      {"moe_lb_plan_relay", {Relay, false, VerifyRelay}},
      {"moe_lb_plan_exact", {Exact, false, VerifyExact}},
      {"moe_lb_plan_exact_kernel", {ExactKernel, false, VerifyExactKernel}},
      {"moe_lb_plan_ultraep_kernel", {Edit<RandomUltraEp>, false, VerifyEdit}},
      {"moe_lb_plan_relay_kernel", {Relay, false, VerifyRelay}},
      {"moe_lb_plan_spray", {Spray, false, VerifySpray}},
  };
}

}  // namespace moe_lb::testing
