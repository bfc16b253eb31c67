// Plans and copies in parallel with GPU computation.
//
// `copy_post` records `ready` on XLA's stream. The fetch stream waits for it and copies the planner's operands to
// pinned memory. The device's thread does the rest, in parallel with the program: it waits for the fetch, plans and
// meets the other devices, and the last of them queues the copies. Their sources and destinations are ready on all
// devices by then, and the copies wait for no work launched by XLA after the post. So plan and copies overlap the
// program even if its launching thread blocks on the GPU, as it does for every iteration of a loop.
//
// The second call is launched after the work in between. It blocks on the host until the copies are queued, and uploads
// the plan on XLA's stream. `copy_join` is shared with `copy_start`.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ffi/transport/outcome_error.h"
#include "ffi/transport/peer_handlers.h"
#include "ffi/transport/peer_planning.h"
#include "ffi/transport/peer_site_cuda.h"

namespace moe_lb {
namespace peer_cuda {
namespace {

constexpr size_t kPlanArrays = 2;

// State of one call site of `copy_post`. A post shares ownership of the site, because its program may end first.
struct PostSite {
  static xf::TypeId id;
  static xf::TypeInfo info;

  PostSite(PeerAttributes attributes, int64_t size, int64_t kinds, PlanFunction given)
      : site(std::make_shared<Site>(std::move(attributes))),
        plan_size(static_cast<size_t>(size)),
        num_kinds(kinds),
        plan(std::move(given)) {}

  const std::shared_ptr<Site> site;
  const size_t plan_size;
  const int64_t num_kinds;
  const PlanFunction plan;
};
xf::TypeId PostSite::id = {};
xf::TypeInfo PostSite::info = xf::MakeTypeInfo<PostSite>();

struct Shape {
  size_t rows;
  size_t columns;
};

// State of one call from `copy_post` to the second call.
struct Post {
  std::shared_ptr<Site> site;
  PlanFunction plan;
  std::vector<Shape> shapes;  // of the planner's operands, and of its results
  size_t words = 0;           // int32 of all operands
  Addresses home;
  std::shared_ptr<LaunchResources> resources;  // pinned: place, the operands, the plan
  std::vector<int32_t> tables;
  std::shared_ptr<PendingCall> pending;

  int32_t* operands() const { return resources->host + kPlaceWords; }
  int32_t* results() const { return operands() + words; }
};
using Posted = std::shared_ptr<Post>;

PeerTickets<Posted>& OpenPosts() {
  static auto* const posts = new PeerTickets<Posted>;
  return *posts;
}

Addresses AddressesOf(const std::vector<xf::AnyBuffer>& arrays) {
  Addresses addresses;
  for (const xf::AnyBuffer& array : arrays) addresses.push_back(array.untyped_data());
  return addresses;
}

Status PassAllOn(cudaStream_t stream, const std::vector<xf::AnyBuffer>& before,
                 const std::vector<xf::AnyBuffer>& after) {
  for (size_t i = 0; i < after.size(); ++i) {
    if (Status bad = PassOn(stream, before[i], after[i])) return bad;
  }
  return Ok();
}

// ---- the plan ----------------------------------------------------------------------

// Views of the planner's arrays, one after the other in pinned memory.
template <typename T>
std::vector<MatrixView<T>> Lay(const std::vector<Shape>& shapes, int32_t* memory) {
  std::vector<MatrixView<T>> laid;
  for (const Shape& shape : shapes) {
    laid.emplace_back(memory, shape.rows, shape.columns);
    memory += shape.rows * shape.columns;
  }
  return laid;
}

// Plans in pinned memory and sets the tables of the plan in a share.
Status Plan(Post* post, PeerShare* share) {
  const Results plan = Lay<int32_t>(post->shapes, post->results());
  const PlannerCall call = {"planner of copy_post", {}, {}, post->plan};
  if (Status bad = Attempt(call, Lay<const int32_t>(post->shapes, post->operands()), plan)) return bad;
  const auto num_home = static_cast<size_t>(post->site->attributes.num_home);
  if (Status bad = PlannedTables(plan, num_home, &post->tables)) return bad;
  const PeerTables tables = TablesIn(plan, num_home, post->tables);
  share->wanted = tables.wanted;
  share->relay = tables.relay;
  return Ok();
}

// ---- post --------------------------------------------------------------------------

// Checks shapes and types, which are equal on all devices.
Status ReadPost(const PostSite& site, const PostedArrays& arrays, int32_t device, Post* post, PeerShare* share) {
  for (const xf::AnyBuffer& operand : arrays.operands) {
    MatrixView<const int32_t> matrix{nullptr, 0, 0};
    if (Status bad = AsMatrix("operand of the planner", operand, &matrix)) return bad;
    post->words += matrix.rows() * matrix.columns();
    post->shapes.push_back({matrix.rows(), matrix.columns()});
  }
  if (Status bad = CheckSame("operands of the planner", arrays.operands.size(), kPlanArrays)) return bad;
  if (Status bad = CheckSame("numbers of the plan", site.plan_size, post->words)) return bad;
  const auto num_home = static_cast<size_t>(site.site->attributes.num_home);
  const Shape placement = post->shapes[0];
  if (placement.columns < num_home) {
    return Refuse("placement has ", placement.columns, " slots; expected at least the ", num_home, " home experts");
  }
  PeerShareBuilder builder(site.site->attributes, device);
  const MatrixView<const int32_t> later{nullptr, placement.rows, placement.columns - num_home};
  if (Status bad = ReadShare({later, later}, arrays, &builder)) return bad;
  *share = builder.Take();
  post->home = AddressesOf(arrays.home);
  return Ok();
}

Status StartPost(cudaStream_t stream, const PeerIntegers& place, xf::ResultBuffer<xf::S32>& ticket,
                 const PostedArrays& arrays, Post* post) {
  MOE_LB_CUDA(cudaMemsetAsync(ticket->typed_data(), 0, ticket->size_bytes(), stream));
  std::vector<View<const int32_t>> operands;
  for (const xf::AnyBuffer& operand : arrays.operands) {
    operands.emplace_back(static_cast<const int32_t*>(operand.untyped_data()), operand.element_count());
  }
  // `ready` covers the weights, the operands of the planner and the memory of the slots: all of them precede
  // `copy_post` on XLA's stream.
  if (Status bad = QueueFetch(stream, place.typed_data(), operands, post->words, &post->resources)) return bad;
  return PassAllOn(stream, arrays.before, arrays.after);
}

xf::Error PostHandler(cudaStream_t stream, xf::RunId run, int32_t device, PostSite* site, PendingJoins* pending_joins,
                      PeerIntegers place, xf::RemainingArgs args, xf::ResultBuffer<xf::S32> ticket,
                      xf::RemainingRets rets) {
  if (Status bad = CheckSame("numbers in place", place.element_count(), kPlaceWords)) return ToError(bad);
  if (Status bad = CheckSame("numbers in ticket", ticket->element_count(), 2)) return ToError(bad);
  PostedArrays arrays;
  PeerShare share;
  const auto post = std::make_shared<Post>();
  if (Status bad = SortPostedArrays(args, rets, site->num_kinds, &arrays)) return ToError(bad);
  if (Status bad = ReadPost(*site, arrays, device, post.get(), &share)) return ToError(bad);
  post->site = site->site;
  post->plan = site->plan;
  const Addresses slots = AddressesOf(arrays.slots);
  post->pending = std::make_shared<PendingCall>(run.run_id, TicketOf(device, slots), slots);
  // Before this call queues any work that outlives it.
  site->site->Begin(post->pending.get());
  pending_joins->Add(post->pending);
  const Status bad = StartPost(stream, place, ticket, arrays, post.get());
  const CallArguments arguments = {std::move(share), post->resources, post->pending, post};
  if (bad) {
    Abandon(site->site.get(), arguments, {bad, false});
    return ToError(post->pending->Wait());
  }
  OpenPosts().OpenAs(run.run_id, post->pending->ticket, post);
  // An open post holds pinned memory.
  post->pending->forget = [run_id = run.run_id, ticket = post->pending->ticket] {
    Posted open;
    static_cast<void>(OpenPosts().Close(run_id, ticket, &open));
  };
  MeetWhenFetched(site->site, run, device, arguments,
                  [post = post.get()](PeerShare* shown) { return Plan(post, shown); });
  return xf::Error::Success();
}

xf::ErrorOr<std::unique_ptr<PendingJoins>> InitializePost(cudaStream_t stream, PostSite* site, PeerIntegers,
                                                          xf::RemainingArgs args, xf::ResultBuffer<xf::S32>,
                                                          xf::RemainingRets rets) {
  if (const Outcome outcome = site->site->Prepare(); outcome.failure) return xf::Unexpected(ToError(outcome));
  PostedArrays arrays;
  if (Status bad = SortPostedArrays(args, rets, site->num_kinds, &arrays)) return xf::Unexpected(ToError(bad));
  size_t words = kPlaceWords + site->plan_size;
  for (const xf::AnyBuffer& operand : arrays.operands) words += operand.element_count();
  Gpu* gpu = nullptr;
  Status bad = Gpu::Current(&gpu);
  if (!bad) bad = gpu->Prepare(words);
  if (bad) return xf::Unexpected(ToError(bad));
  return std::make_unique<PendingJoins>(stream, gpu, words);
}

// ---- plan and copy -------------------------------------------------------------------

// Takes the post of these slots.
Status TakePost(int64_t run_id, int32_t device, const PlannedArrays& arrays, Posted* post) {
  const Addresses slots = AddressesOf(arrays.posted);
  // Running kernels may still use other memory.
  if (OpenPosts().Close(run_id, TicketOf(device, slots), post) || (*post)->pending->slots != slots ||
      AddressesOf(arrays.slots) != slots) {
    return Refuse(
        "slots are not the buffers of a post in this run that was not used yet; expected `plan_and_copy` in the "
        "computation of its `post`");
  }
  // The copies wait only for work before the post.
  if (AddressesOf(arrays.home) == (*post)->home) return Ok();
  return Refuse(
      "home is not the buffers that post was given; expected the same arrays, not copies of them or weights that were "
      "computed again");
}

// Uploads on XLA's stream: XLA's next kernels read the plan there and must not wait for the copies.
Status Upload(cudaStream_t stream, const PlannerCall& call, const Post& post) {
  const Results plan = Lay<int32_t>(post.shapes, post.results());
  if (Status bad = CheckSame("results of the planner", call.results.size(), plan.size())) return bad;
  for (size_t i = 0; i < plan.size(); ++i) {
    const View<int32_t> to = call.results[i].flat();
    if (Status bad = CheckSame("numbers of the plan", to.size(), plan[i].flat().size())) return bad;
    MOE_LB_CUDA(CopyWords(to.data(), plan[i].flat().data(), to.size(), cudaMemcpyHostToDevice, stream));
  }
  // The pinned memory can be reused after this event.
  MOE_LB_CUDA(cudaEventRecord(post.resources->uploaded.get(), stream));
  return Ok();
}

Status Finish(cudaStream_t stream, const PlannerCall& call, const Post& post, const PlannedArrays& arrays,
              VectorResult& ticket) {
  if (Status bad = Upload(stream, call, post)) return bad;
  if (Status bad = PassAllOn(stream, arrays.before, arrays.after)) return bad;
  MOE_LB_CUDA(cudaMemsetAsync(ticket->typed_data(), 0, ticket->size_bytes(), stream));
  return Ok();
}

xf::Error PlanAndStart(const PlannerCall& call, VectorResult& ticket, PeerIntegers& posted,
                       const xf::RemainingArgs& args, const xf::RemainingRets& rets, xf::RunId run, cudaStream_t stream,
                       int32_t device) {
  static_cast<void>(posted);  // ties the calls together for XLA
  if (Status bad = CheckSame("numbers in ticket", ticket->element_count(), 2)) return ToError(bad);
  PlannedArrays arrays;
  Posted post;
  // Shapes and programs are equal on all devices, so all fail alike.
  if (Status bad = SortPlannedArrays(args, rets, &arrays)) return ToError(bad);
  if (Status bad = TakePost(run.run_id, device, arrays, &post)) return ToError(bad);
  // The rendezvous has usually ended by now. `copy_join` needs the events, which its last device sets.
  if (const Outcome outcome = post->pending->Wait(); outcome.failure) return ToError(outcome);
  if (Status bad = Finish(stream, call, *post, arrays, ticket)) return ToError(bad);
  OpenTickets().OpenAs(run.run_id, post->pending->ticket, post->pending);
  return xf::Error::Success();
}

// Handler of a planner: `make_call` takes the planner's arguments. It uploads the posted plan and does not plan.
template <auto make_call>
struct PlanAndCopy;

template <typename... Args, PlannerCall (*make_call)(Args...)>
struct PlanAndCopy<make_call> {
  static xf::Error Run(Args... args, VectorResult ticket, PeerIntegers posted, xf::RemainingArgs arrays,
                       xf::RemainingRets results, xf::RunId run, cudaStream_t stream, int32_t device) {
    return PlanAndStart(make_call(args...), ticket, posted, arrays, results, run, stream, device);
  }
};

template <typename Binding>
auto OnStream(Binding binding) {
  return std::move(binding).template Ctx<xf::PlatformStream<cudaStream_t>>().template Ctx<xf::DeviceOrdinal>();
}

XLA_FFI_DEFINE_HANDLER(kMakePostSite, Made<MakePostSite<PostSite>>::Run, BindPost());

XLA_FFI_DEFINE_HANDLER(kInitializePost, InitializePost,
                       xf::Ffi::BindInitialize()
                           .Ctx<xf::PlatformStream<cudaStream_t>>()
                           .Ctx<xf::State<PostSite>>()
                           .Arg<PeerIntegers>()  // place [2]
                           .RemainingArgs()
                           .Ret<PeerIntegers>()  // ticket [2]
                           .RemainingRets());

// Without the trait for recording into a graph: a replay would neither fetch nor plan.
XLA_FFI_DEFINE_HANDLER(kPost, PostHandler,
                       xf::Ffi::Bind()
                           .Ctx<xf::PlatformStream<cudaStream_t>>()
                           .Ctx<xf::RunId>()
                           .Ctx<xf::DeviceOrdinal>()
                           .Ctx<xf::State<PostSite>>()
                           .Ctx<xf::Initialized<PendingJoins>>()
                           .Arg<PeerIntegers>()  // place [2]
                           .RemainingArgs()      // the planner's operands, home [L, ...] of each kind, passed arrays
                           .Ret<PeerIntegers>()  // ticket [2]
                           .RemainingRets());    // slots [P, ...] of each kind, not written yet; passed arrays

XLA_FFI_DEFINE_HANDLER(kGreedy, PlanAndCopy<GreedyCall>::Run, OnStream(AndCopy(BindingOf(GreedyCall))));
XLA_FFI_DEFINE_HANDLER(kFeplb, PlanAndCopy<FeplbCall>::Run, OnStream(AndCopy(BindingOf(FeplbCall))));

}  // namespace
}  // namespace peer_cuda

Registrations PeerPlanningRegistrations() {
  using namespace peer_cuda;
  return {{{"moe_lb_cuda_peer_post_site", &PostSite::id, &PostSite::info}},
          {{"moe_lb_copy_post", kPost, kMakePostSite, kInitializePost},
           {"moe_lb_plan_greedy_and_copy", kGreedy},
           {"moe_lb_plan_feplb_and_copy", kFeplb}}};
}

}  // namespace moe_lb
