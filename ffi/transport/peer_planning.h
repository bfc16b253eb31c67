// Plan and copy in one call, posted ahead: `moe_lb_copy_post`, then `moe_lb_plan_<planner>_and_copy`, then
// `moe_lb_copy_join`, under these names on all platforms.
//
// `copy_post` announces the planner and the weights, and owns the slot buffers: operations between the two calls might
// still use a buffer allocated by the second. The host computes the same plan on all ranks and starts the copies of its
// placement: on a GPU as soon as the operands arrive, in parallel with the program; on a CPU in the second call.
#pragma once

#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ffi/common/registrations.h"
#include "ffi/planning/planners.h"
#include "ffi/transport/peer_operands.h"

namespace moe_lb {

// Handlers of this platform; one definition per platform.
Registrations PeerPlanningRegistrations();

inline auto BindPost() {
  return BindPeerSite()
      .Attr<int64_t>("plan_size")         // int32 words of the planner's results
      .Attr<int64_t>("num_kinds")         // of weights
      .Attr<std::string_view>("planner")  // of the second call
      .Attr<xf::Dictionary>("options");   // the attributes of the second call
}

// Type of PlannerCall::plan.
using PlanFunction = std::function<Status(const Operands&, const Results&)>;

// Reads the options of a planner of a plan, and returns it.
template <typename Options, typename Planner>
Status Read(const xf::Dictionary& attributes, Planner planner, PlanFunction* plan) {
  Options options;
  if (Status bad = ReadOptions(attributes, &options)) return Refuse("options of the planner: ", *bad);
  *plan = [=](const Operands& in, const Results& out) { return planner(in[0], in[1], options, out[0], out[1]); };
  return Ok();
}

// Returns the planner of `plan_<name>_and_copy` with these attributes, from placement and quota.
inline Status PlannerNamed(std::string_view name, const xf::Dictionary& options, PlanFunction* plan) {
  if (name == "greedy") return Read<GreedyOptions>(options, Greedy, plan);
  if (name == "feplb") return Read<FeplbOptions>(options, Feplb, plan);
  return Refuse("planner is ", name, "; expected greedy or feplb");
}

inline Status CheckPlanSize(int64_t plan_size) {
  if (plan_size >= 0 && plan_size <= std::numeric_limits<int32_t>::max()) return Ok();
  return Refuse("plan_size is ", plan_size, "; expected 0 to ", std::numeric_limits<int32_t>::max());
}

// State of one call site of `copy_post`: `PostSite(attributes, plan_size, num_kinds, plan)` of the platform.
template <typename PostSite>
xf::ErrorOr<std::unique_ptr<PostSite>> MakePostSite(PeerAttributes attributes, int64_t plan_size, int64_t num_kinds,
                                                    std::string_view planner, xf::Dictionary options) {
  if (Status bad = CheckPlanSize(plan_size)) return xf::Unexpected(ToError(bad));
  PlanFunction plan;
  if (Status bad = PlannerNamed(planner, options, &plan)) return xf::Unexpected(ToError(bad));
  return std::make_unique<PostSite>(std::move(attributes), plan_size, num_kinds, std::move(plan));
}

// Extends `Binding`, the planner's arguments, by those of the second call. A planner's binding ends with its status
// word. Here that result is the ticket, because planning on this thread can fail with an error.
template <typename Binding>
auto AndCopy(Binding binding) {
  return std::move(binding)
      .template Arg<PeerIntegers>()  // ticket of copy_post [2]
      .RemainingArgs()               // home of each kind, slots of each kind, passed arrays
      .RemainingRets()               // slots and passed arrays, aliased to the operands
      .template Ctx<xf::RunId>();
}

// Operands and results of `copy_post`.
struct PostedArrays {
  std::vector<xf::AnyBuffer> operands;  // of the planner
  std::vector<xf::AnyBuffer> home;
  std::vector<xf::AnyBuffer> slots;
  std::vector<xf::AnyBuffer> before;  // passed through, so that their users are launched after this call
  std::vector<xf::AnyBuffer> after;
};

// Operands and results of the second call.
struct PlannedArrays {
  std::vector<xf::AnyBuffer> home;
  std::vector<xf::AnyBuffer> posted;  // the slots, results of copy_post
  std::vector<xf::AnyBuffer> slots;   // the slots, as results
  std::vector<xf::AnyBuffer> before;
  std::vector<xf::AnyBuffer> after;  // `before`, as results
};

inline Status CheckSameBytes(const char* name, size_t index, const xf::AnyBuffer& in, const xf::AnyBuffer& out) {
  if (in.size_bytes() == out.size_bytes()) return Ok();
  return Refuse(name, " ", index, " has ", in.size_bytes(), " bytes and its result has ", out.size_bytes(),
                "; expected as many");
}

// args: the planner's operands, home of each kind, passed arrays; rets: slots of each kind, passed arrays.
inline Status SortPostedArrays(const xf::RemainingArgs& args, const xf::RemainingRets& rets, int64_t num_kinds,
                               PostedArrays* sorted) {
  const auto kinds = static_cast<size_t>(num_kinds);
  if (num_kinds < 1 || rets.size() < kinds || args.size() < rets.size()) {
    return Refuse("got ", args.size(), " arrays, ", rets.size(), " results and ", num_kinds,
                  " kinds; expected the planner's operands and as many more as results, and at least 1 kind");
  }
  const size_t planner = args.size() - rets.size();
  for (size_t i = 0; i < planner; ++i) sorted->operands.push_back(*args.get<xf::AnyBuffer>(i));
  for (size_t i = 0; i < kinds; ++i) {
    sorted->home.push_back(*args.get<xf::AnyBuffer>(planner + i));
    sorted->slots.push_back(**rets.get<xf::AnyBuffer>(i));
  }
  for (size_t i = kinds; i < rets.size(); ++i) {
    sorted->before.push_back(*args.get<xf::AnyBuffer>(planner + i));
    sorted->after.push_back(**rets.get<xf::AnyBuffer>(i));
    if (Status bad = CheckSameBytes("array", i, sorted->before.back(), sorted->after.back())) return bad;
  }
  return Ok();
}

// args: home of each kind, slots of each kind, passed arrays; rets: the last two.
inline Status SortPlannedArrays(const xf::RemainingArgs& args, const xf::RemainingRets& rets, PlannedArrays* sorted) {
  const size_t kinds = args.size() < rets.size() ? 0 : args.size() - rets.size();
  if (kinds == 0 || rets.size() < kinds) {
    return Refuse("got ", args.size(), " arrays and ", rets.size(), " results; expected K home, K slots and any more, ",
                  "and all but the first K as results");
  }
  for (size_t i = 0; i < kinds; ++i) {
    sorted->home.push_back(*args.get<xf::AnyBuffer>(i));
    sorted->posted.push_back(*args.get<xf::AnyBuffer>(kinds + i));
    sorted->slots.push_back(**rets.get<xf::AnyBuffer>(i));
    if (Status bad = CheckSameBytes("slots of kind", i, sorted->posted[i], sorted->slots[i])) return bad;
  }
  for (size_t i = kinds; i < rets.size(); ++i) {
    sorted->before.push_back(*args.get<xf::AnyBuffer>(kinds + i));
    sorted->after.push_back(**rets.get<xf::AnyBuffer>(i));
    if (Status bad = CheckSameBytes("array", i, sorted->before.back(), sorted->after.back())) return bad;
  }
  return Ok();
}

// The tables of a plan, each [R, S - L].
struct PeerTables {
  MatrixView<const int32_t> wanted{nullptr, 0, 0};
  MatrixView<const int32_t> relay{nullptr, 0, 0};
};

inline PeerTables TablesIn(const Results& plan, size_t num_home, const std::vector<int32_t>& memory) {
  const size_t ranks = plan[0].rows(), slots = plan[0].columns() - num_home;
  return {{memory.data(), ranks, slots}, {memory.data() + ranks * slots, ranks, slots}};
}

// Computes the tables: each rank's slots after its home experts, all copied from home. The first result of a planner is
// its placement [R, S].
//   tables: receives wanted and relay.
inline Status PlannedTables(const Results& plan, size_t num_home, std::vector<int32_t>* tables) {
  const MatrixView<int32_t> placement = plan[0];
  if (placement.columns() < num_home) {
    return Refuse("placement has ", placement.columns(), " slots; expected at least the ", num_home, " home experts");
  }
  for (size_t rank = 0; rank < placement.rows(); ++rank) {
    tables->insert(tables->end(), placement[rank].begin() + num_home, placement[rank].end());
  }
  tables->resize(2 * tables->size(), -1);
  return Ok();
}

// Sets the tables, which must outlive the share, and the arrays of a share.
template <typename Arrays>
Status ReadShare(const PeerTables& tables, const Arrays& arrays, PeerShareBuilder* builder) {
  if (Status bad = builder->Tables(tables.wanted, tables.relay)) return bad;
  for (size_t kind = 0; kind < arrays.home.size(); ++kind) {
    if (Status bad = builder->Weights(arrays.home[kind], arrays.slots[kind])) return bad;
  }
  return Ok();
}

}  // namespace moe_lb
