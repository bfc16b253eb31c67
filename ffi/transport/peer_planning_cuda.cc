// Plans and copies beside what a GPU already computes. This is compiled and has not run on a GPU yet.
//
// `copy_post` records `ready` on XLA's stream; the copy stream waits for it and fetches the planner's operands into
// pinned memory. XLA then launches what runs in between. The second call is launched after it, but waits on the host
// only for that fetch; it plans, queues the copies on the copy streams, which wait for the `ready` of all devices and
// not for what runs in between, and uploads the plan on XLA's stream. `copy_join` is that of `copy_start`.
//
// Pinned memory comes round again safely: a later turn's fetch waits for its `ready`, which XLA's stream records after
// this turn's upload, and the host plans after that fetch.
#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/transport/outcome_error.h"
#include "ffi/transport/peer_handlers.h"
#include "ffi/transport/peer_planning.h"
#include "ffi/transport/peer_site_cuda.h"

namespace moe_lb {
namespace peer_cuda {
namespace {

using Clock = std::chrono::steady_clock;
using Addresses = std::vector<const void*>;

constexpr size_t kPlaceWords = 2;

// One per call site of `copy_post`. What was posted keeps the site: its program may be gone before it is used.
struct PostSite {
  static xf::TypeId id;
  static xf::TypeInfo info;

  PostSite(PeerAttributes attributes, int64_t size, int64_t kinds)
      : site(std::make_shared<Site>(std::move(attributes))), plan_size(static_cast<size_t>(size)), num_kinds(kinds) {}

  const std::shared_ptr<Site> site;
  const size_t plan_size;
  const int64_t num_kinds;
};
xf::TypeId PostSite::id = {};
xf::TypeInfo PostSite::info = xf::MakeTypeInfo<PostSite>();

// What was posted, by the address of the slots, as with `copy_join`.
struct Post {
  std::shared_ptr<Site> site;
  Addresses slots;
  Lane* lane = nullptr;  // of the site
  Turn* turn = nullptr;
  int device = 0;
  size_t operand_words = 0;
  size_t plan_words = 0;
};

PeerTickets<Post>& OpenPosts() {
  static PeerTickets<Post>* const posts = new PeerTickets<Post>;
  return *posts;
}

Addresses AddressesOf(const std::vector<xf::AnyBuffer>& arrays) {
  Addresses addresses;
  for (const xf::AnyBuffer& array : arrays) addresses.push_back(array.untyped_data());
  return addresses;
}

cudaError_t CopyWords(int32_t* to, const int32_t* from, size_t words, cudaMemcpyKind kind, cudaStream_t stream) {
  return words == 0 ? cudaSuccess : cudaMemcpyAsync(to, from, words * sizeof(int32_t), kind, stream);
}

Status PassOn(cudaStream_t stream, const std::vector<xf::AnyBuffer>& before, const std::vector<xf::AnyBuffer>& after) {
  for (size_t i = 0; i < after.size(); ++i) {
    const void* from = before[i].untyped_data();
    void* to = after[i].untyped_data();
    const size_t bytes = before[i].size_bytes();
    if (from != to && bytes > 0) MOE_LB_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
  }
  return Ok();
}

// ---- post --------------------------------------------------------------------------

// Queues the fetch of `place` and the planner's operands, one after the other in the turn's pinned memory.
Status Fetch(cudaStream_t stream, const int32_t* place, const std::vector<xf::AnyBuffer>& operands, Post* post) {
  MOE_LB_CUDA(cudaGetDevice(&post->device));
  const size_t words = kPlaceWords + post->operand_words + post->plan_words;
  if (Status bad = post->site->LaneOf(post->device, words, &post->lane)) return bad;
  post->turn = post->lane->Next();
  const cudaStream_t copies = post->lane->stream();
  // `ready` stands for the weights, the operands of the planner and the memory of the slots alike: all of them precede
  // `copy_post` on XLA's stream.
  MOE_LB_CUDA(cudaEventRecord(post->turn->ready.get(), stream));
  MOE_LB_CUDA(cudaStreamWaitEvent(copies, post->turn->ready.get(), 0));
  int32_t* to = post->turn->host;
  MOE_LB_CUDA(CopyWords(to, place, kPlaceWords, cudaMemcpyDeviceToHost, copies));
  to += kPlaceWords;
  for (const xf::AnyBuffer& operand : operands) {
    const auto* from = static_cast<const int32_t*>(operand.untyped_data());
    MOE_LB_CUDA(CopyWords(to, from, operand.element_count(), cudaMemcpyDeviceToHost, copies));
    to += operand.element_count();
  }
  MOE_LB_CUDA(cudaEventRecord(post->turn->tables.get(), copies));
  return Ok();
}

Status PostNow(cudaStream_t stream, int64_t run_id, const PostSite& site, PeerIntegers& place,
               const xf::RemainingArgs& args, xf::ResultBuffer<xf::S32>& ticket, const xf::RemainingRets& rets) {
  if (Status bad = CheckSame("numbers in place", place.element_count(), kPlaceWords)) return bad;
  if (Status bad = CheckSame("numbers in ticket", ticket->element_count(), 2)) return bad;
  PostedArrays arrays;
  if (Status bad = SortPostedArrays(args, rets, site.num_kinds, &arrays)) return bad;
  Post post;
  post.site = site.site;
  post.plan_words = site.plan_size;
  post.slots = AddressesOf(arrays.slots);
  for (size_t i = 0; i < arrays.operands.size(); ++i) {
    if (arrays.operands[i].element_type() != xf::S32) return Refuse("operand ", i, " of the planner is not int32");
    post.operand_words += arrays.operands[i].element_count();
  }
  MOE_LB_CUDA(cudaMemsetAsync(ticket->typed_data(), 0, ticket->size_bytes(), stream));
  if (Status bad = Fetch(stream, place.typed_data(), arrays.operands, &post)) return bad;
  if (Status bad = PassOn(stream, arrays.before, arrays.after)) return bad;
  const int64_t number = TicketOf(post.slots);
  OpenPosts().OpenAs(run_id, number, std::move(post));
  return Ok();
}

xf::Error PostHandler(cudaStream_t stream, xf::RunId run, PostSite* site, PeerIntegers place, xf::RemainingArgs args,
                      xf::ResultBuffer<xf::S32> ticket, xf::RemainingRets rets) {
  return ToError(PostNow(stream, run.run_id, *site, place, args, ticket, rets));
}

// ---- plan and copy -------------------------------------------------------------------

// Waits until the operands are on the host, which takes microseconds unless the device lags behind. The event is asked
// again and again, since cudaEventSynchronize has no time-out and a device that is stuck would hang the program. The
// thread first only yields, as the plan is on the critical path, and then sleeps so that it leaves the core to others.
Outcome WaitForOperands(const Post& post) {
  const PeerAttributes& attributes = post.site->attributes;
  const Clock::time_point begin = Clock::now();
  const std::chrono::duration<double> patience(attributes.timeout_s);
  for (;;) {
    const cudaError_t state = cudaEventQuery(post.turn->tables.get());
    if (state != cudaErrorNotReady) return {Cuda(state, "cudaEventQuery"), false};
    const Clock::duration waited = Clock::now() - begin;
    if (waited > patience) {
      return {Refuse(attributes.site, ": device ", post.device, " did not bring the planner's operands to the host ",
                     "within ", attributes.timeout_s, " s; expected it to make progress"),
              true};
    }
    if (waited < std::chrono::microseconds(200)) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
}

// The planner's arrays, laid over pinned memory.
template <typename T>
std::vector<MatrixView<T>> Lay(const std::vector<MatrixView<T>>& arrays, int32_t* memory) {
  std::vector<MatrixView<T>> laid;
  for (const auto& array : arrays) {
    laid.emplace_back(memory, array.rows(), array.columns());
    memory += array.rows() * array.columns();
  }
  return laid;
}

// Plans in pinned memory, uploads the plan on XLA's stream, and fills `share` with the copies of the plan. `tables`
// must outlive the share.
Status Plan(cudaStream_t stream, const PlannerCall& call, const Post& post, const PlannedArrays& arrays,
            std::vector<int32_t>* tables, PeerShare* share) {
  if (Status bad = CheckSame("numbers of operands", NumWordsOf(call.operands), post.operand_words)) return bad;
  if (Status bad = CheckSame("numbers of the plan", NumWordsOf(call.results), post.plan_words)) return bad;
  int32_t* const host = post.turn->host + kPlaceWords;
  const Operands operands = Lay(call.operands, host);
  const Results plan = Lay(call.results, host + post.operand_words);
  if (Status bad = Attempt(call, operands, plan)) return bad;
  for (size_t i = 0; i < plan.size(); ++i) {
    const View<int32_t> to = call.results[i].flat();
    // The upload is on XLA's stream and not on the copy stream: XLA's next kernels read the plan there, and need not
    // wait for the copies.
    MOE_LB_CUDA(CopyWords(to.data(), plan[i].flat().data(), to.size(), cudaMemcpyHostToDevice, stream));
  }
  const auto num_home = static_cast<size_t>(post.site->attributes.num_home);
  if (Status bad = PlannedTables(plan, num_home, tables)) return bad;
  PeerShareBuilder builder(post.site->attributes, post.device);
  if (Status bad = ReadPlanned(plan, num_home, *tables, arrays, &builder)) return bad;
  *share = builder.Take();
  return Ok();
}

// Takes what was posted for these slots.
Status TakePost(int64_t run_id, const PlannedArrays& arrays, Post* post) {
  const Addresses slots = AddressesOf(arrays.posted);
  // Other memory may be what still runs uses.
  if (!OpenPosts().Close(run_id, TicketOf(slots), post) && post->slots == slots && AddressesOf(arrays.slots) == slots) {
    return Ok();
  }
  return Refuse(
      "slots are not the buffers of a post in this run that was not used yet; expected `plan_and_copy` in the "
      "computation of its `post`");
}

xf::Error PlanAndStart(const PlannerCall& call, VectorResult& ticket, PeerIntegers& posted,
                       const xf::RemainingArgs& args, const xf::RemainingRets& rets, xf::RunId run,
                       cudaStream_t stream) {
  static_cast<void>(posted);  // ties the calls together for XLA
  if (Status bad = CheckSame("numbers in ticket", ticket->element_count(), 2)) return ToError(bad);
  PlannedArrays arrays;
  Post post;
  // Shapes and programs are the same on all devices, so all are refused.
  if (Status bad = SortPlannedArrays(args, rets, &arrays)) return ToError(bad);
  if (Status bad = TakePost(run.run_id, arrays, &post)) return ToError(bad);
  if (const Outcome fetched = WaitForOperands(post); fetched.failure) return ToError(fetched);
  std::vector<int32_t> tables;
  Note note;
  note.slots = AddressesOf(arrays.slots);
  // The last to arrive fills in `note.waits` from its own thread, while this one is inside ArriveAndWait.
  Brought brought = {{}, post.lane, post.turn, &note.waits};
  Status refusal = Plan(stream, call, post, arrays, &tables, &brought.share);
  if (!refusal) refusal = PassOn(stream, arrays.before, arrays.after);
  if (!refusal) {
    refusal = Cuda(cudaMemsetAsync(ticket->typed_data(), 0, ticket->size_bytes(), stream), "cudaMemsetAsync");
  }
  const Arrival who = ArrivalOf(run, post.device, post.turn->host);
  // It arrives with a refusal too, so that nobody waits for this device.
  const Outcome outcome = post.site->meeting.ArriveAndWait(who, std::move(brought), std::move(refusal));
  if (outcome.failure) return ToError(outcome);
  const int64_t number = TicketOf(note.slots);
  OpenTickets().OpenAs(run.run_id, number, std::move(note));
  return xf::Error::Success();
}

// The handler of the planner whose arguments `make_call` takes.
template <auto make_call>
struct PlanAndCopy;

template <typename... Args, PlannerCall (*make_call)(Args...)>
struct PlanAndCopy<make_call> {
  static xf::Error Run(Args... args, VectorResult ticket, PeerIntegers posted, xf::RemainingArgs arrays,
                       xf::RemainingRets results, xf::RunId run, cudaStream_t stream) {
    return PlanAndStart(make_call(args...), ticket, posted, arrays, results, run, stream);
  }
};

template <typename Binding>
auto OnStream(Binding binding) {
  return std::move(binding).template Ctx<xf::PlatformStream<cudaStream_t>>();
}

XLA_FFI_DEFINE_HANDLER(kMakePostSite, MakePostSite<PostSite>, BindPost());

// Without the trait that would let XLA record them into a graph: a replay would neither fetch nor plan.
XLA_FFI_DEFINE_HANDLER(kPost, PostHandler,
                       xf::Ffi::Bind()
                           .Ctx<xf::PlatformStream<cudaStream_t>>()
                           .Ctx<xf::RunId>()
                           .Ctx<xf::State<PostSite>>()
                           .Arg<PeerIntegers>()  // place [2]
                           .RemainingArgs()  // the planner's operands, home [L, ...] of each kind, what is passed on
                           .Ret<PeerIntegers>()  // ticket [2]
                           .RemainingRets());    // slots [P, ...] of each kind, not written yet; what is passed on

XLA_FFI_DEFINE_HANDLER(kGreedy, PlanAndCopy<GreedyCall>::Run, OnStream(AndCopy(GreedyBinding())));
XLA_FFI_DEFINE_HANDLER(kFeplb, PlanAndCopy<FeplbCall>::Run, OnStream(AndCopy(FeplbBinding())));

}  // namespace
}  // namespace peer_cuda

Registrations PeerPlanningRegistrations() {
  using namespace peer_cuda;
  return {{{"moe_lb_cuda_peer_post_site", &PostSite::id, &PostSite::info}},
          {{"moe_lb_copy_post", kPost, kMakePostSite},
           {"moe_lb_plan_greedy_and_copy", kGreedy},
           {"moe_lb_plan_feplb_and_copy", kFeplb}}};
}

}  // namespace moe_lb
