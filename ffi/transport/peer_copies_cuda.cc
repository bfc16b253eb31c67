// Peer copies of NVIDIA GPUs, by copy engines on a separate stream.
//
// The devices of a group meet once per call, on their own threads. Each arrives when its tables are on the host, so all
// work before them is complete. The last to arrive queues the copies of all devices. Meanwhile the programs launch
// their next operations, up to the join.
// If every rank is a process of its own, each queues the copies into its own memory (`Between`).
// `copy_join` makes XLA's stream wait for the copies into this device and for those out of it, so that XLA does not
// free weights still being read. A program failing before its join waits for them at its end (`PendingJoins`).
#include <cuda_runtime_api.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ffi/transport/outcome_error.h"
#include "ffi/transport/peer_handlers.h"
#include "ffi/transport/peer_operands.h"
#include "ffi/transport/peer_site_cuda.h"

namespace moe_lb {
namespace peer_cuda {
namespace {

// State of one call site starting copies. The device's thread shares ownership of the site, because the program may
// end before it.
struct StartSite {
  static xf::TypeId id;
  static xf::TypeInfo info;

  const std::shared_ptr<Site> site;
};
xf::TypeId StartSite::id = {};
xf::TypeInfo StartSite::info = xf::MakeTypeInfo<StartSite>();

xf::ErrorOr<std::unique_ptr<StartSite>> MakeSite(PeerAttributes attributes) {
  return std::unique_ptr<StartSite>(new StartSite{std::make_shared<Site>(std::move(attributes))});
}

// State of one call site of `copy_rows`.
struct RowSite {
  static xf::TypeId id;
  static xf::TypeInfo info;

  const std::shared_ptr<Site> site;
  const bool back;
  const size_t num_kinds;
};
xf::TypeId RowSite::id = {};
xf::TypeInfo RowSite::info = xf::MakeTypeInfo<RowSite>();

xf::ErrorOr<std::unique_ptr<RowSite>> MakeRowSite(PeerAttributes attributes, bool back, int64_t num_kinds) {
  return std::unique_ptr<RowSite>(
      new RowSite{std::make_shared<Site>(std::move(attributes)), back, static_cast<size_t>(num_kinds)});
}

xf::ErrorOr<std::unique_ptr<PendingJoins>> Initialize(cudaStream_t stream, Site* site, size_t table_words) {
  if (const Outcome outcome = site->Prepare(); outcome.failure) return xf::Unexpected(ToError(outcome));
  const size_t words = kPlaceWords + table_words;
  Gpu* gpu = nullptr;
  Status bad = Gpu::Current(&gpu);
  if (!bad) bad = gpu->Prepare(words);
  if (bad) return xf::Unexpected(ToError(bad));
  return std::make_unique<PendingJoins>(stream, gpu, words);
}

xf::ErrorOr<std::unique_ptr<PendingJoins>> InitializeStart(cudaStream_t stream, StartSite* site, PeerIntegers,
                                                           xf::AnyBuffer wanted, xf::AnyBuffer, xf::RemainingArgs) {
  return Initialize(stream, site->site.get(), 2 * wanted.element_count());
}

xf::ErrorOr<std::unique_ptr<PendingJoins>> InitializeRows(cudaStream_t stream, RowSite* site, PeerIntegers,
                                                          xf::AnyBuffer home, xf::AnyBuffer, xf::AnyBuffer,
                                                          xf::RemainingArgs, xf::ResultBuffer<xf::S32>,
                                                          xf::RemainingRets) {
  return Initialize(stream, site->site.get(), 3 * home.element_count());
}

// ---- start -------------------------------------------------------------------------

// Context of a call starting copies.
struct Launch {
  cudaStream_t stream;
  xf::RunId run;
  int32_t device;
  const std::shared_ptr<Site>& site;
  PendingJoins* pending_joins;
};

// Starts the copies of a share whose tables are still on the device. Copy engines take addresses from the host, so the
// host must read the tables before it can queue the copies. The device's thread waits for them while this thread
// launches the next operations.
xf::Error Begin(const Launch& launch, const PeerIntegers& place, xf::ResultBuffer<xf::S32>& ticket, PeerShare share) {
  const Addresses addresses(share.slots.begin(), share.slots.end());
  const auto pending = std::make_shared<PendingCall>(launch.run.run_id, TicketOf(launch.device, addresses), addresses);
  Site* const site = launch.site.get();
  // Before this call queues any work that outlives it.
  site->Begin(pending.get());
  launch.pending_joins->Add(pending);
  const std::vector<MatrixView<const int32_t>*> tables = {&share.wanted, &share.relay, &share.first, &share.size};
  std::vector<View<const int32_t>> fetched;
  for (const MatrixView<const int32_t>* table : tables) fetched.push_back(table->flat());
  CallArguments arguments = {std::move(share), nullptr, pending};
  // The ticket's value is unused on a GPU, see OpenTickets. It is set so that the result is initialized.
  Status bad = Cuda(cudaMemsetAsync(ticket->typed_data(), 0, ticket->size_bytes(), launch.stream), "cudaMemsetAsync");
  if (!bad) bad = QueueFetch(launch.stream, place.typed_data(), fetched, 0, &arguments.resources);
  if (bad) {
    Abandon(site, arguments, {bad, false});
    return ToError(pending->Wait());
  }
  OpenTickets().OpenAs(pending->run_id, pending->ticket, pending);
  const int32_t* host = arguments.resources->host + kPlaceWords;
  MeetWhenFetched(launch.site, launch.run, launch.device, std::move(arguments), [host](PeerShare* shown) {
    const int32_t* at = host;
    for (MatrixView<const int32_t>* table : {&shown->wanted, &shown->relay, &shown->first, &shown->size}) {
      *table = {at, table->rows(), table->columns()};
      at += table->flat().size();
    }
    return Ok();
  });
  return xf::Error::Success();
}

Status CheckIntegers(const PeerIntegers& place, xf::ResultBuffer<xf::S32>& ticket) {
  if (Status bad = CheckSame("numbers in place", place.element_count(), kPlaceWords)) return bad;
  return CheckSame("numbers in ticket", ticket->element_count(), 2);
}

xf::Error StartHandler(cudaStream_t stream, xf::RunId run, int32_t device, StartSite* site, PendingJoins* pending_joins,
                       PeerIntegers place, xf::AnyBuffer wanted, xf::AnyBuffer relay, xf::RemainingArgs home,
                       xf::ResultBuffer<xf::S32> ticket, xf::RemainingRets slots) {
  // Shapes are equal on all devices, so all fail alike.
  if (Status bad = CheckIntegers(place, ticket)) return ToError(bad);
  PeerShareBuilder builder(site->site->attributes, device);
  if (Status bad = ReadCopy(wanted, relay, home, slots, &builder)) return ToError(bad);
  return Begin({stream, run, device, site->site, pending_joins}, place, ticket, builder.Take());
}

xf::Error RowsHandler(cudaStream_t stream, xf::RunId run, int32_t device, RowSite* site, PendingJoins* pending_joins,
                      PeerIntegers place, xf::AnyBuffer home, xf::AnyBuffer first, xf::AnyBuffer size,
                      xf::RemainingArgs args, xf::ResultBuffer<xf::S32> ticket, xf::RemainingRets rets) {
  const size_t kinds = site->num_kinds;
  if (Status bad = CheckIntegers(place, ticket)) return ToError(bad);
  PeerShareBuilder builder(site->site->attributes, device);
  if (Status bad = builder.RowTables(home, first, size, site->back)) return ToError(bad);
  PassedRows passed;
  if (Status bad = CheckRowArrays(args, rets, kinds, &passed)) return ToError(bad);
  for (size_t kind = 0; kind < kinds; ++kind) {
    if (Status bad = builder.Rows(*args.get<xf::AnyBuffer>(kind), **rets.get<xf::AnyBuffer>(kind))) return ToError(bad);
  }
  // Before `ready` is recorded, because copies overwrite part of it.
  for (size_t i = 0; i < passed.count; ++i) {
    const xf::AnyBuffer out = **rets.get<xf::AnyBuffer>(passed.first + i);
    if (Status bad = PassOn(stream, *args.get<xf::AnyBuffer>(kinds + i), out)) return ToError(bad);
  }
  return Begin({stream, run, device, site->site, pending_joins}, place, ticket, builder.Take());
}

// ---- join --------------------------------------------------------------------------

Outcome Join(cudaStream_t stream, int64_t run_id, int32_t device, const Addresses& slots) {
  std::shared_ptr<PendingCall> pending;
  if (OpenTickets().Close(run_id, TicketOf(device, slots), &pending) || pending->slots != slots) {
    return {Refuse("slots are not the buffers of a start in this run that was not joined yet; expected `join` in the "
                   "computation of its `start`"),
            false};
  }
  // The rendezvous has usually ended by now. Its last device sets the events to wait for.
  if (const Outcome outcome = pending->Wait(); outcome.failure) return outcome;
  if (Status bad = pending->JoinOn(stream)) return {bad, false};
  if (pending->between == nullptr) return {};
  return pending->between->WhyReleased("copies of expert weights", pending->number);
}

xf::Error JoinHandler(cudaStream_t stream, xf::RunId run, int32_t device, PeerIntegers ticket,
                      xf::RemainingArgs operands, xf::RemainingRets slots) {
  static_cast<void>(ticket);  // ties the calls together for XLA
  if (operands.size() < slots.size()) return ToError(CheckSame("slots", operands.size(), slots.size()));
  Addresses addresses;
  for (size_t kind = 0; kind < slots.size(); ++kind) {
    addresses.push_back(operands.get<xf::AnyBuffer>(kind)->untyped_data());
  }
  if (const Outcome outcome = Join(stream, run.run_id, device, addresses); outcome.failure) return ToError(outcome);
  for (size_t kind = 0; kind < slots.size(); ++kind) {
    if (Status bad = PassOn(stream, *operands.get<xf::AnyBuffer>(kind), **slots.get<xf::AnyBuffer>(kind))) {
      return ToError(bad);
    }
  }
  return xf::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kMakeSite, Made<MakeSite>::Run, BindPeerSite());

XLA_FFI_DEFINE_HANDLER(kInitializeStart, InitializeStart,
                       xf::Ffi::BindInitialize()
                           .Ctx<xf::PlatformStream<cudaStream_t>>()
                           .Ctx<xf::State<StartSite>>()
                           .Arg<PeerIntegers>()   // place [2]
                           .Arg<xf::AnyBuffer>()  // wanted [R, P]
                           .Arg<xf::AnyBuffer>()  // relay [R, P]
                           .RemainingArgs());

// Without the trait for recording into a graph: batched copies cannot be captured.
XLA_FFI_DEFINE_HANDLER(kStart, StartHandler,
                       xf::Ffi::Bind()
                           .Ctx<xf::PlatformStream<cudaStream_t>>()
                           .Ctx<xf::RunId>()
                           .Ctx<xf::DeviceOrdinal>()
                           .Ctx<xf::State<StartSite>>()
                           .Ctx<xf::Initialized<PendingJoins>>()
                           .Arg<PeerIntegers>()   // place [2]
                           .Arg<xf::AnyBuffer>()  // wanted [R, P]
                           .Arg<xf::AnyBuffer>()  // relay [R, P]
                           .RemainingArgs()       // home [L, ...] of each kind
                           .Ret<PeerIntegers>()   // ticket [2]
                           .RemainingRets());     // slots [P, ...] of each kind

XLA_FFI_DEFINE_HANDLER(
    kInitializeRows, InitializeRows,
    AndRows(xf::Ffi::BindInitialize().Ctx<xf::PlatformStream<cudaStream_t>>().Ctx<xf::State<RowSite>>()));

XLA_FFI_DEFINE_HANDLER(kRows, RowsHandler,
                       AndRows(xf::Ffi::Bind()
                                   .Ctx<xf::PlatformStream<cudaStream_t>>()
                                   .Ctx<xf::RunId>()
                                   .Ctx<xf::DeviceOrdinal>()
                                   .Ctx<xf::State<RowSite>>()
                                   .Ctx<xf::Initialized<PendingJoins>>()));

XLA_FFI_DEFINE_HANDLER(kMakeRowSite, Made<MakeRowSite>::Run, BindRowSite());

XLA_FFI_DEFINE_HANDLER(
    kJoin, JoinHandler,
    xf::Ffi::Bind()
        .Ctx<xf::PlatformStream<cudaStream_t>>()
        .Ctx<xf::RunId>()
        .Ctx<xf::DeviceOrdinal>()
        .Arg<PeerIntegers>()  // ticket [2]
        .RemainingArgs()      // slots of each kind, then the operands of copy_start, and arrays to wait for
        .RemainingRets());    // slots

}  // namespace
}  // namespace peer_cuda

Registrations PeerRegistrations() {
  using namespace peer_cuda;
  return {{{"moe_lb_cuda_peer_site", &StartSite::id, &StartSite::info},
           {"moe_lb_cuda_row_site", &RowSite::id, &RowSite::info},
           {"moe_lb_cuda_pending_joins", &PendingJoins::id, &PendingJoins::info}},
          {{"moe_lb_copy_start", kStart, kMakeSite, kInitializeStart},
           {"moe_lb_copy_rows", kRows, kMakeRowSite, kInitializeRows},
           {"moe_lb_copy_join", kJoin}}};
}

}  // namespace moe_lb
