// Plans and copies of CPU devices. The counts are in host memory: `copy_post` records the arrival, and the second call
// plans at once. Copies and buffer lifetime are those of `copy_start`: XLA holds all buffers until the call's future
// completes.
#include <memory>
#include <utility>

#include "ffi/transport/peer_handlers.h"
#include "ffi/transport/peer_planning.h"
#include "ffi/transport/peer_site_cpu.h"

namespace moe_lb {
namespace peer_cpu {
namespace {

// State of one call site of `copy_post`. A post shares ownership of the site, because its program may end first.
struct PostSite {
  static xf::TypeId id;
  static xf::TypeInfo info;

  // The second call plans, with its own options.
  PostSite(PeerAttributes attributes, int64_t size, int64_t kinds, const PlanFunction&)
      : site(std::make_shared<Site>(std::move(attributes), Copy)), plan_size(size), num_kinds(kinds) {}

  const std::shared_ptr<Site> site;
  const int64_t plan_size;
  const int64_t num_kinds;
};
xf::TypeId PostSite::id = {};
xf::TypeInfo PostSite::info = xf::MakeTypeInfo<PostSite>();

struct Post {
  std::shared_ptr<Site> site;
  Arrival who = {};
  int64_t plan_size = 0;
};

PeerTickets<Post>& OpenPosts() {
  static PeerTickets<Post>* const posts = new PeerTickets<Post>;
  return *posts;
}

void PassAllOn(const std::vector<xf::AnyBuffer>& before, const std::vector<xf::AnyBuffer>& after) {
  for (size_t i = 0; i < before.size(); ++i) PassOn(before[i], after[i]);
}

xf::Error PostHandler(xf::RunId run, int32_t device, PostSite* site, PeerIntegers place, xf::RemainingArgs args,
                      xf::ResultBuffer<xf::S32> ticket, xf::RemainingRets rets) {
  if (Status bad = CheckSame("numbers in place", place.element_count(), 2)) return ToError(bad);
  if (Status bad = CheckSame("numbers in ticket", ticket->element_count(), 2)) return ToError(bad);
  PostedArrays arrays;
  if (Status bad = SortPostedArrays(args, rets, site->num_kinds, &arrays)) return ToError(bad);
  if (Status bad = CheckSame("operands of the planner", arrays.operands.size(), 2)) return ToError(bad);
  const Arrival who = ArrivalOf(run, device, place.typed_data());
  // No devices meet here, so errors are local: shapes belong to the program and fail on all devices alike.
  PassAllOn(arrays.before, arrays.after);
  WriteTicket(OpenPosts().Open(run.run_id, {site->site, who, site->plan_size}), ticket->typed_data());
  return xf::Error::Success();
}

// Plans and sets `arguments` to the copies of the plan.
Status Plan(const PlannerCall& call, const Post& post, const PlannedArrays& arrays, CallArguments* arguments) {
  const PeerAttributes& attributes = post.site->attributes;
  if (Status bad = CheckSame("numbers of the plan", NumWords(call.results), static_cast<size_t>(post.plan_size))) {
    return bad;
  }
  // Every participant computes the same plan from the same operands. CheckEqualTables detects differences.
  if (Status bad = Attempt(call, call.operands, call.results)) return bad;
  const auto num_home = static_cast<size_t>(attributes.num_home);
  if (Status bad = PlannedTables(call.results, num_home, &arguments->tables)) return bad;
  PeerShareBuilder builder(attributes, post.who.device);
  if (Status bad = ReadShare(TablesIn(call.results, num_home, arguments->tables), arrays, &builder)) return bad;
  // The share refers to `arguments->tables`. Moving `arguments` into the rendezvous moves the vector and keeps its
  // memory.
  arguments->share = builder.Take();
  return Ok();
}

xf::Future PlanAndStart(const PlannerCall& call, VectorResult& ticket, PeerIntegers& posted,
                        const xf::RemainingArgs& args, const xf::RemainingRets& rets, xf::RunId run) {
  if (Status bad = CheckSame("numbers in the ticket", posted.element_count(), 2)) return Failed(bad);
  if (Status bad = CheckSame("numbers in ticket", ticket->element_count(), 2)) return Failed(bad);
  Post post;
  // Without its post this device has no rank to arrive as; the others fail by their time-out.
  if (OpenPosts().Close(run.run_id, ReadTicket(posted.typed_data()), &post)) {
    return Failed(Refuse(call.name, ": ticket is ", ReadTicket(posted.typed_data()),
                         "; expected one that post gave in this run of the program and that was not used yet"));
  }
  PlannedArrays arrays;
  CallArguments arguments;
  Status refusal = SortPlannedArrays(args, rets, &arrays);
  if (!refusal) refusal = Plan(call, post, arrays, &arguments);
  // Write results and ticket before the arrival: the future may then complete, and other threads may read them.
  if (!refusal) PassAllOn(arrays.before, arrays.after);
  WriteTicket(OpenTickets().Open(run.run_id, {}), ticket->typed_data());
  return Arrive(post.site.get(), post.who, std::move(arguments), std::move(refusal));
}

// Handler of a planner: `make_call` takes the planner's arguments.
template <auto make_call>
struct PlanAndCopy;

template <typename... Args, PlannerCall (*make_call)(Args...)>
struct PlanAndCopy<make_call> {
  static xf::Future Run(Args... args, VectorResult ticket, PeerIntegers posted, xf::RemainingArgs arrays,
                        xf::RemainingRets results, xf::RunId run) {
    return PlanAndStart(make_call(args...), ticket, posted, arrays, results, run);
  }
};

XLA_FFI_DEFINE_HANDLER(kMakePostSite, Made<MakePostSite<PostSite>>::Run, BindPost());

XLA_FFI_DEFINE_HANDLER(kPost, PostHandler,
                       xf::Ffi::Bind()
                           .Ctx<xf::RunId>()
                           .Ctx<xf::DeviceOrdinal>()
                           .Ctx<xf::State<PostSite>>()
                           .Arg<PeerIntegers>()  // place [2]
                           .RemainingArgs()      // the planner's operands, home [L, ...] of each kind, passed arrays
                           .Ret<PeerIntegers>()  // ticket [2]
                           .RemainingRets());    // slots [P, ...] of each kind, not written yet; passed arrays

XLA_FFI_DEFINE_HANDLER(kGreedy, PlanAndCopy<GreedyCall>::Run, AndCopy(BindingOf(GreedyCall)));
XLA_FFI_DEFINE_HANDLER(kFeplb, PlanAndCopy<FeplbCall>::Run, AndCopy(BindingOf(FeplbCall)));

}  // namespace
}  // namespace peer_cpu

Registrations PeerPlanningRegistrations() {
  using namespace peer_cpu;
  return {{{"moe_lb_peer_post_site", &PostSite::id, &PostSite::info}},
          {{"moe_lb_copy_post", kPost, kMakePostSite},
           {"moe_lb_plan_greedy_and_copy", kGreedy},
           {"moe_lb_plan_feplb_and_copy", kFeplb}}};
}

}  // namespace moe_lb
