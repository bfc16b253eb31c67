// Call sites of GPU copies: state shared by all handlers copying weights or rows between devices.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "ffi/transport/between_cuda.h"
#include "ffi/transport/gpu_cuda.h"
#include "ffi/transport/peer_operands.h"
#include "ffi/transport/peer_tickets.h"

namespace moe_lb::peer_cuda {

using Addresses = std::vector<const void*>;

// Copies of one device from `copy_start` or `copy_post` to `copy_join`.
struct PendingCall {
  PendingCall(int64_t run, int64_t number, Addresses given) : run_id(run), ticket(number), slots(std::move(given)) {}

  // Sets the outcome of the rendezvous for these copies. Call it once.
  void End(const Outcome& how);
  // Blocks until `End`. The time-out of the rendezvous bounds the wait.
  Outcome Wait();
  // Makes `stream` wait for the copies into this device and for readers of its weights. Later calls have no effect.
  Status JoinOn(cudaStream_t stream);
  bool is_joined();

  const int64_t run_id;
  const int64_t ticket;
  const Addresses slots;
  // Launch resources whose `copied` event this device must wait for, set by the last rank to arrive, before `End`. They
  // return to the pool after all devices waiting for them have joined.
  std::vector<std::shared_ptr<LaunchResources>> awaited;
  // For a call between processes: its group, its number in launch order, and the ranks copying from this one.
  Between* between = nullptr;
  uint32_t number = 0;
  std::vector<size_t> readers;
  // Unregisters the call; used if the program fails before the join.
  std::function<void()> forget = nullptr;
  // Launch resources whose fetch the host abandoned after a failure; set before `End`.
  std::shared_ptr<LaunchResources> fetching;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Outcome> outcome_;
  bool joined_ = false;
};

// Copies started and not joined. The ticket value is in device memory, which the host cannot read without
// synchronizing, so the key is the address of the slots: XLA does not reuse it between the two calls.
PeerTickets<std::shared_ptr<PendingCall>>& OpenTickets();

// Key of a call: the first non-null slot address, or the device if all weights are empty and have no address.
int64_t TicketOf(int32_t device, const Addresses& slots);

// Copies started and not joined by one call site, in one execution of a program on one device. XLA creates it in
// the initialize stage and destroys it when the program has ended or failed, before it reuses the program's buffers.
// The destructor makes XLA's stream wait for the copies of a program failing between start and join: they would
// otherwise write into buffers of another program.
class PendingJoins {
 public:
  static xf::TypeId id;
  static xf::TypeInfo info;

  // words: the argument of `gpu->Prepare`.
  PendingJoins(cudaStream_t stream, Gpu* gpu, size_t words) : stream_(stream), gpu_(gpu), words_(words) {}
  ~PendingJoins();
  PendingJoins(const PendingJoins&) = delete;
  PendingJoins& operator=(const PendingJoins&) = delete;

  void Add(const std::shared_ptr<PendingCall>& pending);

 private:
  const cudaStream_t stream_;
  Gpu* const gpu_;
  const size_t words_;
  std::vector<std::shared_ptr<PendingCall>> calls_;
};

// Arguments of one participant of a call.
struct CallArguments {
  PeerShare share;
  std::shared_ptr<LaunchResources> resources;
  std::shared_ptr<PendingCall> pending;
  std::shared_ptr<void> owner = nullptr;  // owner of the share's tables, if not `resources`
};

using CallRendezvous = Rendezvous<CallArguments>;

// Queues the copies of all devices of a rendezvous.
void Copy(View<CallArguments> arguments, const CallRendezvous::Finish& finish);

// Queues one task on the copy stream of the receiving device, which must be current.
Status QueueTask(const PeerTable& table, const PeerTask& task, cudaStream_t stream);

// State of one call site of an executable.
struct Site {
  explicit Site(PeerAttributes given) : attributes(std::move(given)), rendezvous(attributes.Options(), Copy) {}

  // Connects to the other processes, if ranks are processes of their own. Call it in the initialize stage.
  Outcome Prepare();
  // Numbers the call. Call it on the launching thread, which raises the same errors on all devices.
  void Begin(PendingCall* pending) const;

  // Meets the other devices. `arguments.pending` ends with the outcome, before or after the return.
  void Meet(const Arrival& who, CallArguments arguments, Status refusal);
  // Fails the run of a device whose rank is not known yet, so that its peers stop waiting, and ends `pending`.
  void Fail(PendingCall* pending, Outcome outcome);

  const PeerAttributes attributes;
  CallRendezvous rendezvous;
  std::atomic<Between*> between{nullptr};  // null: all are devices of this process
};

// Words of `place`, the first in the pinned memory of `LaunchResources`.
constexpr size_t kPlaceWords = 2;

// Takes launch resources, records `ready`, and queues the fetch of `place` followed by `fetched` into pinned memory.
//   more_words: additional words of pinned memory behind them.
Status QueueFetch(cudaStream_t stream, const int32_t* place, const std::vector<View<const int32_t>>& fetched,
                  size_t more_words, std::shared_ptr<LaunchResources>* resources);

// Fills a share from the fetched tables.
using Show = std::function<Status(PeerShare*)>;

// Waits for the fetch on the device's thread and then meets the other devices there. Returns at once.
void MeetWhenFetched(const std::shared_ptr<Site>& site, xf::RunId run, int32_t device, CallArguments arguments,
                     Show show);

// Fails a call whose rank is unknown because the fetch of `place` failed.
void Abandon(Site* site, const CallArguments& arguments, const Outcome& outcome);

// Copies `in` to `out` on the stream if XLA has not aliased them.
Status PassOn(cudaStream_t stream, const xf::AnyBuffer& in, const xf::AnyBuffer& out);

// Copies int32 words from or to pinned memory. With `words` 0 both pointers may be null.
cudaError_t CopyWords(int32_t* to, const int32_t* from, size_t words, cudaMemcpyKind kind, cudaStream_t stream);

}  // namespace moe_lb::peer_cuda
