// Peer copies of CPU devices, by copier threads in parallel with XLA's threads.
//
// A failing program frees its buffers. So `copy_start` is asynchronous: XLA holds its operands and results until its
// future completes, after all copies of the group; only calls using the result wait. `copy_join` then only checks
// the ticket.
#include <memory>
#include <utility>
#include <variant>
#include <vector>

#include "ffi/transport/outcome_error.h"
#include "ffi/transport/peer_handlers.h"
#include "ffi/transport/peer_operands.h"
#include "ffi/transport/peer_runner.h"
#include "ffi/transport/peer_site_cpu.h"

namespace moe_lb {
namespace peer_cpu {

Tickets& OpenTickets() {
  // Leaked on purpose: programs may still run while the process destroys its static objects.
  static Tickets* const tickets = new Tickets;
  return *tickets;
}

// ---- actions of meetings -------------------------------------------------------

static std::vector<PeerShare> SharesOf(View<CallArguments> arguments) {
  std::vector<PeerShare> shares;
  for (const CallArguments& one : arguments) shares.push_back(one.share);
  return shares;
}

void Copy(View<CallArguments> arguments, CallRendezvous::Finish finish) {
  const std::vector<PeerShare> shares = SharesOf(arguments);
  // All copies are planned from the table of rank 0, and each rank computes its own, so they must be equal.
  if (Status bad = CheckEqualTables(shares)) return finish(bad);
  std::vector<PeerTask> tasks;
  if (Status bad = PlanTasks(shares[0], &tasks)) return finish(bad);
  if (Status bad = RunPeerTasks(std::move(tasks), PeerTable(shares), [finish] { finish(Ok()); })) finish(bad);
}

static void Sum(View<CallArguments> arguments, CallRendezvous::Finish finish) {
  const std::vector<PeerShare> shares = SharesOf(arguments);
  if (Status bad = CheckEqualTables(shares)) return finish(bad);
  if (Status bad = CheckWanted(shares[0].wanted, shares[0].weights.num_home)) return finish(bad);
  // The dtypes belong to the program, which is the same on all devices, so those of rank 0 hold for all.
  const auto done = [finish] { finish(Ok()); };
  if (Status bad = RunPeerSums(shares[0].wanted, arguments[0].numbers, PeerTable(shares), done)) finish(bad);
}

xf::TypeId Site::id = {};
xf::TypeInfo Site::info = xf::MakeTypeInfo<Site>();

template <void (*act)(View<CallArguments>, CallRendezvous::Finish)>
static xf::ErrorOr<std::unique_ptr<Site>> MakeSite(PeerAttributes attributes) {
  return std::make_unique<Site>(std::move(attributes), act);
}

// State of one call site of `copy_rows`.
struct RowSite {
  static xf::TypeId id;
  static xf::TypeInfo info;

  RowSite(PeerAttributes attributes, bool given, size_t kinds)
      : site(std::move(attributes), Copy), back(given), num_kinds(kinds) {}

  Site site;
  const bool back;
  const size_t num_kinds;
};
xf::TypeId RowSite::id = {};
xf::TypeInfo RowSite::info = xf::MakeTypeInfo<RowSite>();

static xf::ErrorOr<std::unique_ptr<RowSite>> MakeRowSite(PeerAttributes attributes, bool back, int64_t num_kinds) {
  return std::make_unique<RowSite>(std::move(attributes), back, static_cast<size_t>(num_kinds));
}

// ---- handlers ------------------------------------------------------------------

xf::Future Failed(const Status& bad) {
  xf::Promise promise;
  xf::Future future(promise);
  promise.SetError(ToError(bad));
  return future;
}

// A refused rank arrives too: the others then fail at once with its message instead of after their time-out.
xf::Future Arrive(Site* site, const Arrival& who, CallArguments arguments, Status refusal) {
  xf::Promise promise;
  xf::Future future(promise);
  site->rendezvous.Arrive(who, std::move(arguments), std::move(refusal), [promise](const Outcome& outcome) {
    // Completing the promise runs the rest of this device's program here, up to its next collective, which blocks. The
    // rendezvous calls this on a separate thread, or on XLA's.
    xf::Promise completed = promise;
    if (!outcome.failure) return completed.SetAvailable();
    completed.SetError(ToError(outcome));
  });
  return future;
}

namespace {

xf::Future StartHandler(xf::RunId run, int32_t device, Site* site, PeerIntegers place, xf::AnyBuffer wanted,
                        xf::AnyBuffer relay, xf::RemainingArgs home, xf::ResultBuffer<xf::S32> ticket,
                        xf::RemainingRets slots) {
  if (Status bad = CheckSame("numbers in place", place.element_count(), 2)) return Failed(bad);
  if (Status bad = CheckSame("numbers in ticket", ticket->element_count(), 2)) return Failed(bad);
  PeerShareBuilder builder(site->attributes, device);
  Status refusal = ReadCopy(wanted, relay, home, slots, &builder);
  // Write the ticket before the arrival: after it the future may complete and `copy_join` run on another thread. A
  // refused start leaves its ticket open; PeerTickets drops those of old runs.
  WriteTicket(OpenTickets().Open(run.run_id, {}), ticket->typed_data());
  return Arrive(site, ArrivalOf(run, device, place.typed_data()), {builder.Take(), {}, {}}, std::move(refusal));
}

Status ReadRowCopy(const xf::AnyBuffer& home, const xf::AnyBuffer& first, const xf::AnyBuffer& size,
                   const xf::RemainingArgs& args, const xf::RemainingRets& rets, bool back, size_t num_kinds,
                   PeerShareBuilder* builder) {
  if (Status bad = builder->RowTables(home, first, size, back)) return bad;
  PassedRows passed;
  if (Status bad = CheckRowArrays(args, rets, num_kinds, &passed)) return bad;
  for (size_t kind = 0; kind < num_kinds; ++kind) {
    if (Status bad = builder->Rows(*args.get<xf::AnyBuffer>(kind), **rets.get<xf::AnyBuffer>(kind))) return bad;
  }
  // Before the arrival, because other ranks may write after it.
  for (size_t i = 0; i < passed.count; ++i) {
    PassOn(*args.get<xf::AnyBuffer>(num_kinds + i), **rets.get<xf::AnyBuffer>(passed.first + i));
  }
  return Ok();
}

xf::Future RowsHandler(xf::RunId run, int32_t device, RowSite* of, PeerIntegers place, xf::AnyBuffer home,
                       xf::AnyBuffer first, xf::AnyBuffer size, xf::RemainingArgs args,
                       xf::ResultBuffer<xf::S32> ticket, xf::RemainingRets rets) {
  if (Status bad = CheckSame("numbers in place", place.element_count(), 2)) return Failed(bad);
  if (Status bad = CheckSame("numbers in ticket", ticket->element_count(), 2)) return Failed(bad);
  PeerShareBuilder builder(of->site.attributes, device);
  Status refusal = ReadRowCopy(home, first, size, args, rets, of->back, of->num_kinds, &builder);
  WriteTicket(OpenTickets().Open(run.run_id, {}), ticket->typed_data());
  return Arrive(&of->site, ArrivalOf(run, device, place.typed_data()), {builder.Take(), {}, {}}, std::move(refusal));
}

xf::Error JoinHandler(xf::RunId run, PeerIntegers ticket, xf::RemainingArgs operands, xf::RemainingRets slots) {
  if (Status bad = CheckSame("numbers in ticket", ticket.element_count(), 2)) return ToError(bad);
  // The slots, then the operands of `copy_start`, which are passed only to keep them alive.
  if (operands.size() < slots.size()) return ToError(CheckSame("slots", operands.size(), slots.size()));
  std::monostate note;
  if (Status bad = OpenTickets().Close(run.run_id, ReadTicket(ticket.typed_data()), &note)) return ToError(bad);
  for (size_t kind = 0; kind < slots.size(); ++kind) {
    const xf::AnyBuffer in = *operands.get<xf::AnyBuffer>(kind);
    const xf::AnyBuffer out = **slots.get<xf::AnyBuffer>(kind);
    if (Status bad = CheckSame("bytes", in.size_bytes(), out.size_bytes())) return ToError(bad);
    // XLA copies an operand if it cannot alias it to the result, and the slots are then not the filled ones.
    PassOn(in, out);
  }
  return xf::Error::Success();
}

Status ReadSum(const xf::AnyBuffer& wanted, const xf::RemainingArgs& slots, const xf::RemainingRets& home,
               PeerShareBuilder* builder, std::vector<PeerNumber>* numbers) {
  // Gradients use no relays; the second table is required by the share.
  if (Status bad = builder->Tables(wanted, wanted)) return bad;
  if (Status bad = CheckSame("results", home.size(), slots.size())) return bad;
  numbers->resize(slots.size());
  for (size_t kind = 0; kind < slots.size(); ++kind) {
    const xf::AnyBuffer of_slots = *slots.get<xf::AnyBuffer>(kind);
    if (Status bad = NumberOf(of_slots.element_type(), &(*numbers)[kind])) return bad;
    if (Status bad = builder->Weights(**home.get<xf::AnyBuffer>(kind), of_slots)) return bad;
  }
  return Ok();
}

xf::Future SumHandler(xf::RunId run, int32_t device, Site* site, PeerIntegers place, xf::AnyBuffer wanted,
                      xf::RemainingArgs slots, xf::RemainingRets home) {
  if (Status bad = CheckSame("numbers in place", place.element_count(), 2)) return Failed(bad);
  PeerShareBuilder builder(site->attributes, device);
  std::vector<PeerNumber> numbers;
  Status refusal = ReadSum(wanted, slots, home, &builder, &numbers);
  return Arrive(site, ArrivalOf(run, device, place.typed_data()), {builder.Take(), std::move(numbers), {}},
                std::move(refusal));
}

// ---- bindings ------------------------------------------------------------------

XLA_FFI_DEFINE_HANDLER(kMakeCopySite, Made<MakeSite<Copy>>::Run, BindPeerSite());
XLA_FFI_DEFINE_HANDLER(kMakeSumSite, Made<MakeSite<Sum>>::Run, BindPeerSite());

XLA_FFI_DEFINE_HANDLER(kStart, StartHandler,
                       xf::Ffi::Bind()
                           .Ctx<xf::RunId>()
                           .Ctx<xf::DeviceOrdinal>()
                           .Ctx<xf::State<Site>>()
                           .Arg<PeerIntegers>()   // place [2]
                           .Arg<xf::AnyBuffer>()  // wanted [R, P]
                           .Arg<xf::AnyBuffer>()  // relay [R, P]
                           .RemainingArgs()       // home [L, ...] of each kind
                           .Ret<PeerIntegers>()   // ticket [2]
                           .RemainingRets());     // slots [P, ...] of each kind

XLA_FFI_DEFINE_HANDLER(kRows, RowsHandler,
                       AndRows(xf::Ffi::Bind().Ctx<xf::RunId>().Ctx<xf::DeviceOrdinal>().Ctx<xf::State<RowSite>>()));
XLA_FFI_DEFINE_HANDLER(kMakeRowSite, Made<MakeRowSite>::Run, BindRowSite());

XLA_FFI_DEFINE_HANDLER(
    kJoin, JoinHandler,
    xf::Ffi::Bind()
        .Ctx<xf::RunId>()
        .Arg<PeerIntegers>()  // ticket [2]
        .RemainingArgs()      // slots of each kind, then the operands of copy_start, and arrays to wait for
        .RemainingRets());    // slots

XLA_FFI_DEFINE_HANDLER(kSum, SumHandler,
                       xf::Ffi::Bind()
                           .Ctx<xf::RunId>()
                           .Ctx<xf::DeviceOrdinal>()
                           .Ctx<xf::State<Site>>()
                           .Arg<PeerIntegers>()   // place [2]
                           .Arg<xf::AnyBuffer>()  // wanted [R, P]
                           .RemainingArgs()       // gradients of slots [P, ...] of each kind
                           .RemainingRets());     // their sums [L, ...] of each kind

}  // namespace
}  // namespace peer_cpu

Registrations PeerRegistrations() {
  using namespace peer_cpu;
  return {{{"moe_lb_peer_site", &Site::id, &Site::info}, {"moe_lb_peer_row_site", &RowSite::id, &RowSite::info}},
          {{"moe_lb_copy_start", kStart, kMakeCopySite},
           {"moe_lb_copy_rows", kRows, kMakeRowSite},
           {"moe_lb_copy_join", kJoin},
           {"moe_lb_copy_sum", kSum, kMakeSumSite}}};
}

}  // namespace moe_lb
