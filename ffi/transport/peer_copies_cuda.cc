// Peer copies of NVIDIA GPUs of one process: copy engines do them on a stream of their own. They are compiled
// and have not run on a GPU yet.
//
// The devices of a group meet twice, as one meeting: `copy_start` arrives with its events recorded; the last to arrive
// queues the copies of all devices, in an order in which every event is recorded before a stream waits for it; then all
// return. `copy_join` makes XLA's stream wait for the copies into this device, and for those out of it, so that XLA
// frees no weights that somebody still reads.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <set>
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

// ---- the copies of all devices -----------------------------------------------------

Status CopyOneByOne(const std::vector<void*>& to, const std::vector<const void*>& from,
                    const std::vector<size_t>& sizes, cudaStream_t stream) {
  for (size_t i = 0; i < to.size(); ++i) {
    // With unified addresses the runtime knows from the pointers which devices the two belong to.
    MOE_LB_CUDA(cudaMemcpyAsync(to[i], from[i], sizes[i], cudaMemcpyDefault, stream));
  }
  return Ok();
}

Status CopyBatch(std::vector<void*> to, std::vector<const void*> from, std::vector<size_t> sizes, cudaStream_t stream) {
  if (to.empty()) return Ok();
#if CUDART_VERSION >= 13000
  cudaMemcpyAttributes attributes = {};
  // Sources may be read only when the stream gets here, because what writes them is ordered before by events alone. The
  // attribute has no default: without it the call is refused.
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  // This is a hint: copy engines leave the multiprocessors to the GEMMs that run beside the copies. The batch has no
  // order inside, which is fine: no piece of a task writes what another one writes or reads.
  attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
  size_t first = 0;
  const cudaError_t error =
      cudaMemcpyBatchAsync(to.data(), from.data(), sizes.data(), to.size(), &attributes, &first, size_t{1}, stream);
  if (error != cudaErrorNotSupported && error != cudaErrorCallRequiresNewerDriver) {
    return Cuda(error, "cudaMemcpyBatchAsync");
  }
  static_cast<void>(cudaGetLastError());  // forget it: copies go one by one
#endif
  return CopyOneByOne(to, from, sizes, stream);
}

// Queues tasks, one after the other. A task comes after all that it waits for, so an event is always recorded before a
// stream is told to wait for it: a wait for an event that is not recorded yet would be no wait at all.
class Queue {
 public:
  Queue(View<Brought> brought, const PeerTable& table, const std::vector<PeerTask>& tasks)
      : brought_(brought), table_(table), tasks_(tasks), done_(tasks.size(), nullptr), needed_(tasks.size(), false) {}

  Status Run() {
    for (const PeerTask& task : tasks_) {
      for (const size_t before : task.after) needed_[before] = true;
    }
    for (size_t i = 0; i < tasks_.size(); ++i) {
      if (Status bad = Add(i)) return bad;
    }
    // This comes after all tasks, so that `copied` of a device means that it has received everything it asked for.
    for (size_t i = 0; i < brought_.size(); ++i) {
      MOE_LB_CUDA(cudaSetDevice(static_cast<int>(brought_[i].share.device)));
      MOE_LB_CUDA(cudaEventRecord(brought_[i].turn->copied.get(), brought_[i].lane->stream()));
    }
    // `copy_join` of an owner also waits for those that read its weights. XLA may reuse their memory as soon as the
    // owner's stream has passed the join, and knows nothing of the readers' streams.
    for (size_t owner = 0; owner < brought_.size(); ++owner) {
      for (size_t reader = 0; reader < brought_.size(); ++reader) {
        if (reader != owner && reads_.count({reader, owner}) == 0) continue;
        brought_[owner].waits->push_back(brought_[reader].turn->copied.get());
      }
    }
    return Ok();
  }

 private:
  Status Add(size_t index) {
    const PeerTask& task = tasks_[index];
    const size_t reader = table_.participant(task.to_rank);
    const Brought& to = brought_[reader];
    MOE_LB_CUDA(cudaSetDevice(static_cast<int>(to.share.device)));
    for (const PeerPiece& piece : task.pieces) {
      if (piece.source == PeerSource::kNothing) continue;
      const size_t owner = table_.participant(piece.from_rank);
      // One wait orders everything that this stream does later, so each pair needs it once; the stream has waited for
      // its own `ready` before it fetched the tables.
      if (!reads_.insert({reader, owner}).second || owner == reader) continue;
      MOE_LB_CUDA(cudaStreamWaitEvent(to.lane->stream(), brought_[owner].turn->ready.get(), 0));
    }
    for (const size_t before : task.after) MOE_LB_CUDA(cudaStreamWaitEvent(to.lane->stream(), done_[before], 0));
    if (Status bad = Copy(task, to.lane->stream())) return bad;
    return needed_[index] ? Record(index, to) : Ok();
  }

  Status Copy(const PeerTask& task, cudaStream_t stream) const {
    std::vector<void*> to;
    std::vector<const void*> from;
    std::vector<size_t> sizes;
    for (const PeerPiece& piece : task.pieces) {
      if (piece.source == PeerSource::kNothing) {
        MOE_LB_CUDA(cudaMemsetAsync(table_.To(task, piece), 0, piece.size, stream));
        continue;
      }
      to.push_back(table_.To(task, piece));
      from.push_back(table_.From(piece));
      sizes.push_back(piece.size);
    }
    return CopyBatch(std::move(to), std::move(from), std::move(sizes), stream);
  }

  Status Record(size_t index, const Brought& to) {
    auto& forwards = to.turn->forwards;
    size_t& used = num_forwards_[to.turn];
    if (used == forwards.size()) forwards.emplace_back();
    Event& event = forwards[used++];
    // An event belongs to the device that is current when it is made: that of the stream that records it.
    if (Status bad = event.Make()) return bad;
    MOE_LB_CUDA(cudaEventRecord(event.get(), to.lane->stream()));
    done_[index] = event.get();
    return Ok();
  }

  const View<Brought> brought_;
  const PeerTable& table_;
  const std::vector<PeerTask>& tasks_;
  std::vector<cudaEvent_t> done_;              // of each task that another one waits for
  std::vector<bool> needed_;                   // tasks that another one waits for
  std::set<std::pair<size_t, size_t>> reads_;  // (reader, owner)
  std::map<const Turn*, size_t> num_forwards_;
};

Status CopyAll(View<Brought> brought) {
  std::vector<PeerShare> shares;
  for (const Brought& one : brought) shares.push_back(one.share);
  if (Status bad = CheckEqualTables(shares)) return bad;
  std::vector<PeerTask> tasks;
  if (Status bad = PlanPeerTasks(shares[0].wanted, shares[0].relay, shares[0].weights, &tasks)) return bad;
  const PeerTable table(std::move(shares));
  return Queue(brought, table, tasks).Run();
}

}  // namespace

void Copy(View<Brought> brought, Meeting::Finish finish) {
  // The last device to arrive queues the copies of all, and makes each of them current for that. The thread is XLA's,
  // which expects its own device afterwards.
  int device = 0;
  Status bad = Cuda(cudaGetDevice(&device), "cudaGetDevice");
  if (!bad) bad = CopyAll(brought);
  if (bad) {
    // XLA frees the buffers of a program that failed, and part of the copies may have been queued: they must be over
    // before the error is returned.
    for (const Brought& one : brought) static_cast<void>(cudaStreamSynchronize(one.lane->stream()));
  }
  static_cast<void>(cudaSetDevice(device));
  finish(bad);
}

xf::TypeId Site::id = {};
xf::TypeInfo Site::info = xf::MakeTypeInfo<Site>();

static xf::ErrorOr<std::unique_ptr<Site>> MakeSite(int64_t num_participants, int64_t num_lanes, int64_t num_home,
                                                   int64_t chunk_bytes, double timeout_s, std::string_view site) {
  PeerAttributes attributes = {num_participants, num_lanes, num_home, chunk_bytes, timeout_s, std::string(site)};
  if (Status bad = CheckAttributes(attributes)) return xf::Unexpected(ToError(bad));
  return std::make_unique<Site>(std::move(attributes));
}

// ---- handlers ----------------------------------------------------------------------

PeerTickets<Note>& OpenTickets() {
  static PeerTickets<Note>* const tickets = new PeerTickets<Note>;
  return *tickets;
}

int64_t TicketOf(const std::vector<const void*>& slots) {
  return slots.empty() ? 0 : static_cast<int64_t>(reinterpret_cast<intptr_t>(slots[0]));
}

namespace {

// Records `ready`, and brings the tables and `place` to the host; the share then shows the host's copy. Waits for what
// they depend on, and for earlier copies of this call site: not for what XLA launches after.
Status FetchTables(Site* site, cudaStream_t stream, const int32_t* place, Brought* brought) {
  int device = 0;
  MOE_LB_CUDA(cudaGetDevice(&device));
  PeerShare& share = brought->share;
  share.device = device;
  const View<const int32_t> wanted = share.wanted.flat(), relay = share.relay.flat();
  if (Status bad = site->LaneOf(device, 2 + 2 * wanted.size(), &brought->lane)) return bad;
  brought->turn = brought->lane->Next();
  const cudaStream_t copies = brought->lane->stream();
  // `ready` is recorded before this device arrives: whoever arrives last makes other streams wait for it.
  MOE_LB_CUDA(cudaEventRecord(brought->turn->ready.get(), stream));
  MOE_LB_CUDA(cudaStreamWaitEvent(copies, brought->turn->ready.get(), 0));
  int32_t* host = brought->turn->host;
  const auto fetch = [&](int32_t* to, const int32_t* from, size_t count) {
    if (count == 0) return cudaSuccess;
    return cudaMemcpyAsync(to, from, count * sizeof(int32_t), cudaMemcpyDeviceToHost, copies);
  };
  MOE_LB_CUDA(fetch(host, place, 2));
  MOE_LB_CUDA(fetch(host + 2, wanted.data(), wanted.size()));
  MOE_LB_CUDA(fetch(host + 2 + wanted.size(), relay.data(), relay.size()));
  MOE_LB_CUDA(cudaEventRecord(brought->turn->tables.get(), copies));
  // Copy engines take addresses from the host, so the host must know the tables before it can queue the copies.
  MOE_LB_CUDA(cudaEventSynchronize(brought->turn->tables.get()));
  const size_t rows = share.wanted.rows(), columns = share.wanted.columns();
  share.wanted = {host + 2, rows, columns};
  share.relay = {host + 2 + rows * columns, rows, columns};
  return Ok();
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

xf::Error StartHandler(cudaStream_t stream, xf::RunId run, Site* site, PeerIntegers place, xf::AnyBuffer wanted,
                       xf::AnyBuffer relay, xf::RemainingArgs home, xf::ResultBuffer<xf::S32> ticket,
                       xf::RemainingRets slots) {
  if (Status bad = CheckSame("numbers in place", place.element_count(), 2)) return ToError(bad);
  if (Status bad = CheckSame("numbers in ticket", ticket->element_count(), 2)) return ToError(bad);
  // Nobody reads the ticket's value on a GPU, see Note; it is set because a result must not be what memory held before.
  if (Status bad = Cuda(cudaMemsetAsync(ticket->typed_data(), 0, ticket->size_bytes(), stream), "cudaMemsetAsync")) {
    return ToError(bad);
  }
  PeerShareBuilder builder(site->attributes, 0);
  // Shapes are equal on all devices, so all are refused.
  if (Status bad = ReadStart(wanted, relay, home, slots, &builder)) return ToError(bad);
  Note note;
  Brought brought;
  brought.share = builder.Take();
  // The last to arrive fills these in from its own thread, while this one is still inside ArriveAndWait.
  brought.waits = &note.waits;
  for (const std::byte* slot : brought.share.slots) note.slots.push_back(slot);
  const std::vector<const void*> addresses = note.slots;
  if (Status bad = FetchTables(site, stream, place.typed_data(), &brought)) return ToError(bad);
  const Arrival who = ArrivalOf(run, brought.share.device, brought.turn->host);
  // This blocks XLA's launching thread until all devices of the group have come. A future would not help: XLA waits at
  // once for that of a handler on a GPU. The handler must return only when the copies are queued, because `copy_join`
  // needs their events.
  const Outcome outcome = site->meeting.ArriveAndWait(who, std::move(brought), Ok());
  if (outcome.failure) return ToError(outcome);
  OpenTickets().OpenAs(run.run_id, TicketOf(addresses), std::move(note));
  return xf::Error::Success();
}

Status Join(cudaStream_t stream, int64_t run_id, const std::vector<const void*>& slots) {
  Note note;
  if (OpenTickets().Close(run_id, TicketOf(slots), &note) || note.slots != slots) {
    return Refuse(
        "slots are not the buffers of a start in this run that was not joined yet; expected `join` in the "
        "computation of its `start`");
  }
  for (const cudaEvent_t event : note.waits) MOE_LB_CUDA(cudaStreamWaitEvent(stream, event, 0));
  return Ok();
}

xf::Error JoinHandler(cudaStream_t stream, xf::RunId run, PeerIntegers ticket, xf::RemainingArgs operands,
                      xf::RemainingRets slots) {
  static_cast<void>(ticket);  // ties the calls together for XLA
  if (operands.size() < slots.size()) return ToError(CheckSame("slots", operands.size(), slots.size()));
  std::vector<const void*> addresses;
  for (size_t kind = 0; kind < slots.size(); ++kind) {
    addresses.push_back(operands.get<xf::AnyBuffer>(kind)->untyped_data());
  }
  if (Status bad = Join(stream, run.run_id, addresses)) return ToError(bad);
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

// Without the trait that would let XLA record it into a graph: batched copies cannot be captured.
XLA_FFI_DEFINE_HANDLER(kStart, StartHandler,
                       xf::Ffi::Bind()
                           .Ctx<xf::PlatformStream<cudaStream_t>>()
                           .Ctx<xf::RunId>()
                           .Ctx<xf::State<Site>>()
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
        .Arg<PeerIntegers>()  // ticket [2]
        .RemainingArgs()      // slots of each kind, then the operands of copy_start, and what comes before
        .RemainingRets());    // slots

}  // namespace
}  // namespace peer_cuda

Registrations PeerRegistrations() {
  using namespace peer_cuda;
  return {{{"moe_lb_cuda_peer_site", &Site::id, &Site::info}},
          {{"moe_lb_copy_start", kStart, kMakeSite}, {"moe_lb_copy_join", kJoin}}};
}

}  // namespace moe_lb
