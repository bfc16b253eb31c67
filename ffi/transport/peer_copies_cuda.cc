// Peer copies of NVIDIA GPUs: copy engines do them on a stream of their own. They are compiled and run
// on a stand-in for the CUDA runtime; not run on a GPU.
//
// The devices of a group meet once: `copy_start` arrives when its tables are on the host, and so all that was computed
// before them is done; the last to arrive queues the copies of all devices; then all return.
// Where every rank is a process of its own, each queues the copies into its own memory (`Between`).
// `copy_join` makes XLA's stream wait for the copies into this device, and for those out of it, so that XLA frees no
// weights that somebody still reads. A program that fails before its join waits for them when it ends (`Unjoined`).
#include <cuda_runtime_api.h>

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ffi/transport/outcome_error.h"
#include "ffi/transport/peer_handlers.h"
#include "ffi/transport/peer_operands.h"
#include "ffi/transport/peer_site_cuda.h"

namespace moe_lb {
namespace peer_cuda {
namespace {

constexpr size_t kPlaceWords = 2;

xf::ErrorOr<std::unique_ptr<Site>> MakeSite(int64_t num_participants, int64_t num_lanes, int64_t num_home,
                                            int64_t chunk_bytes, double timeout_s, std::string_view site,
                                            xf::Span<const int64_t> processes) {
  PeerAttributes attributes =
      MakePeerAttributes(num_participants, num_lanes, num_home, chunk_bytes, timeout_s, site, processes);
  if (Status bad = CheckAttributes(attributes)) return xf::Unexpected(ToError(bad));
  return std::make_unique<Site>(std::move(attributes));
}

size_t NumWords(size_t slots) { return kPlaceWords + 2 * slots; }

xf::ErrorOr<std::unique_ptr<Unjoined>> InitializeStart(cudaStream_t stream, Site* site, PeerIntegers,
                                                       xf::AnyBuffer wanted, xf::AnyBuffer, xf::RemainingArgs) {
  if (const Outcome outcome = site->Prepare(); outcome.failure) return xf::Unexpected(ToError(outcome));
  const size_t words = NumWords(wanted.element_count());
  Gpu* gpu = nullptr;
  Status bad = Gpu::Current(&gpu);
  if (!bad) bad = gpu->Prepare(words);
  if (bad) return xf::Unexpected(ToError(bad));
  return std::make_unique<Unjoined>(stream, gpu, words);
}

// ---- start -------------------------------------------------------------------------

// Records `ready`, and queues the fetch of the tables and `place`. The share then shows the host's copy.
Status QueueFetch(cudaStream_t stream, const int32_t* place, Brought* brought) {
  Gpu* gpu = nullptr;
  if (Status bad = Gpu::Current(&gpu)) return bad;
  PeerShare& share = brought->share;
  const View<const int32_t> wanted = share.wanted.flat(), relay = share.relay.flat();
  if (Status bad = gpu->Take(NumWords(wanted.size()), &brought->turn)) return bad;
  const Turn& turn = *brought->turn;
  const cudaStream_t fetches = gpu->fetches();
  // What is fetched is computed on XLA's stream, as are the weights, and the slots are another's memory until here. So
  // all of that is over when the host has the tables.
  MOE_LB_CUDA(cudaEventRecord(turn.ready.get(), stream));
  MOE_LB_CUDA(cudaStreamWaitEvent(fetches, turn.ready.get(), 0));
  int32_t* const host = turn.host + kPlaceWords;
  MOE_LB_CUDA(CopyWords(turn.host, place, kPlaceWords, cudaMemcpyDeviceToHost, fetches));
  MOE_LB_CUDA(CopyWords(host, wanted.data(), wanted.size(), cudaMemcpyDeviceToHost, fetches));
  MOE_LB_CUDA(CopyWords(host + wanted.size(), relay.data(), relay.size(), cudaMemcpyDeviceToHost, fetches));
  MOE_LB_CUDA(cudaEventRecord(turn.tables.get(), fetches));
  const size_t rows = share.wanted.rows(), columns = share.wanted.columns();
  share.wanted = {host, rows, columns};
  share.relay = {host + rows * columns, rows, columns};
  return Ok();
}

// Copy engines take addresses from the host, so the host must know the tables before it can queue the copies: it waits
// for what they depend on, and not for what XLA launches after.
Outcome Fetch(cudaStream_t stream, const Site& site, PeerIntegers& place, xf::ResultBuffer<xf::S32>& ticket,
              Brought* brought) {
  // Nobody reads the ticket's value on a GPU, see OpenTickets; it is set because a result must not be what memory held
  // before.
  Status bad = Cuda(cudaMemsetAsync(ticket->typed_data(), 0, ticket->size_bytes(), stream), "cudaMemsetAsync");
  if (!bad) bad = QueueFetch(stream, place.typed_data(), brought);
  if (bad) return {bad, false};
  return WaitForHost(*brought->turn, site.attributes, brought->share.device);
}

Status ReadStart(const xf::AnyBuffer& wanted, const xf::AnyBuffer& relay, const xf::RemainingArgs& home,
                 const xf::RemainingRets& slots, PeerShareBuilder* builder) {
  if (Status bad = builder->Tables(wanted, relay)) return bad;
  if (Status bad = CheckSame("results", slots.size(), home.size())) return bad;
  for (size_t kind = 0; kind < home.size(); ++kind) {
    if (Status bad = builder->Weights(*home.get<xf::AnyBuffer>(kind), **slots.get<xf::AnyBuffer>(kind))) return bad;
  }
  return Ok();
}

xf::Error StartHandler(cudaStream_t stream, xf::RunId run, int32_t device, Site* site, Unjoined* unjoined,
                       PeerIntegers place, xf::AnyBuffer wanted, xf::AnyBuffer relay, xf::RemainingArgs home,
                       xf::ResultBuffer<xf::S32> ticket, xf::RemainingRets slots) {
  // Shapes are equal on all devices, so all are refused.
  if (Status bad = CheckSame("numbers in place", place.element_count(), kPlaceWords)) return ToError(bad);
  if (Status bad = CheckSame("numbers in ticket", ticket->element_count(), 2)) return ToError(bad);
  PeerShareBuilder builder(site->attributes, device);
  if (Status bad = ReadStart(wanted, relay, home, slots, &builder)) return ToError(bad);
  Brought brought;
  brought.share = builder.Take();
  const Addresses addresses(brought.share.slots.begin(), brought.share.slots.end());
  const auto begun = std::make_shared<Begun>(run.run_id, TicketOf(device, addresses), addresses);
  brought.begun = begun;
  // Before anything is queued that outlasts this call.
  site->Begin(begun.get());
  unjoined->Add(begun);
  const Outcome fetched = Fetch(stream, *site, place, ticket, &brought);
  if (fetched.failure) {
    begun->fetching = brought.turn;
    // Who it would have come as was in what was to be fetched.
    site->Fail(begun.get(), fetched);
    return ToError(begun->Wait());
  }
  const Arrival who = ArrivalOf(run, device, brought.turn->host);
  site->Meet(who, std::move(brought), Ok());
  // This blocks XLA's launching thread until all devices of the group have come. A future would not help: XLA waits at
  // once for that of a handler on a GPU. The handler must return only when the copies are queued, because `copy_join`
  // needs their events.
  const Outcome outcome = begun->Wait();
  if (outcome.failure) return ToError(outcome);
  OpenTickets().OpenAs(begun->run_id, begun->ticket, begun);
  return xf::Error::Success();
}

// ---- join --------------------------------------------------------------------------

Status Join(cudaStream_t stream, int64_t run_id, int32_t device, const Addresses& slots) {
  std::shared_ptr<Begun> begun;
  if (OpenTickets().Close(run_id, TicketOf(device, slots), &begun) || begun->slots != slots) {
    return Refuse(
        "slots are not the buffers of a start in this run that was not joined yet; expected `join` in the "
        "computation of its `start`");
  }
  Status bad = begun->JoinOn(stream);
  if (!bad && begun->between != nullptr) bad = begun->between->WhyReleased("copies of expert weights", begun->number);
  return bad;
}

xf::Error JoinHandler(cudaStream_t stream, xf::RunId run, int32_t device, PeerIntegers ticket,
                      xf::RemainingArgs operands, xf::RemainingRets slots) {
  static_cast<void>(ticket);  // ties the calls together for XLA
  if (operands.size() < slots.size()) return ToError(CheckSame("slots", operands.size(), slots.size()));
  Addresses addresses;
  for (size_t kind = 0; kind < slots.size(); ++kind) {
    addresses.push_back(operands.get<xf::AnyBuffer>(kind)->untyped_data());
  }
  if (Status bad = Join(stream, run.run_id, device, addresses)) return ToError(bad);
  for (size_t kind = 0; kind < slots.size(); ++kind) {
    const xf::AnyBuffer in = *operands.get<xf::AnyBuffer>(kind);
    const xf::AnyBuffer out = **slots.get<xf::AnyBuffer>(kind);
    if (Status bad = CheckSame("bytes", in.size_bytes(), out.size_bytes())) return ToError(bad);
    if (in.untyped_data() == out.untyped_data() || in.size_bytes() == 0) continue;
    const cudaError_t copied =
        cudaMemcpyAsync(out.untyped_data(), in.untyped_data(), in.size_bytes(), cudaMemcpyDeviceToDevice, stream);
    if (Status bad = Cuda(copied, "copy of slots")) return ToError(bad);
  }
  return xf::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kMakeSite, MakeSite, BindPeerSite());

XLA_FFI_DEFINE_HANDLER(kInitializeStart, InitializeStart,
                       xf::Ffi::BindInitialize()
                           .Ctx<xf::PlatformStream<cudaStream_t>>()
                           .Ctx<xf::State<Site>>()
                           .Arg<PeerIntegers>()   // place [2]
                           .Arg<xf::AnyBuffer>()  // wanted [R, P]
                           .Arg<xf::AnyBuffer>()  // relay [R, P]
                           .RemainingArgs());

// Without the trait that would let XLA record it into a graph: batched copies cannot be captured.
XLA_FFI_DEFINE_HANDLER(kStart, StartHandler,
                       xf::Ffi::Bind()
                           .Ctx<xf::PlatformStream<cudaStream_t>>()
                           .Ctx<xf::RunId>()
                           .Ctx<xf::DeviceOrdinal>()
                           .Ctx<xf::State<Site>>()
                           .Ctx<xf::Initialized<Unjoined>>()
                           .Arg<PeerIntegers>()   // place [2]
                           .Arg<xf::AnyBuffer>()  // wanted [R, P]
                           .Arg<xf::AnyBuffer>()  // relay [R, P]
                           .RemainingArgs()       // home [L, ...] of each kind
                           .Ret<PeerIntegers>()   // ticket [2]
                           .RemainingRets());     // slots [P, ...] of each kind

XLA_FFI_DEFINE_HANDLER(
    kJoin, JoinHandler,
    xf::Ffi::Bind()
        .Ctx<xf::PlatformStream<cudaStream_t>>()
        .Ctx<xf::RunId>()
        .Ctx<xf::DeviceOrdinal>()
        .Arg<PeerIntegers>()  // ticket [2]
        .RemainingArgs()      // slots of each kind, then the operands of copy_start, and what comes before
        .RemainingRets());    // slots

}  // namespace
}  // namespace peer_cuda

Registrations PeerRegistrations() {
  using namespace peer_cuda;
  return {{{"moe_lb_cuda_peer_site", &Site::id, &Site::info}, {"moe_lb_cuda_unjoined", &Unjoined::id, &Unjoined::info}},
          {{"moe_lb_copy_start", kStart, kMakeSite, kInitializeStart}, {"moe_lb_copy_join", kJoin}}};
}

}  // namespace moe_lb
