// Where GPUs meet to copy weights: what all calls that copy share.
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

// Copies that one device has begun, from `copy_start` or `copy_post` to `copy_join`.
struct Begun {
  Begun(int64_t run, int64_t number, Addresses given) : run_id(run), ticket(number), slots(std::move(given)) {}

  // The meeting for these copies is over; once.
  void End(const Outcome& how);
  // Waits for that. A meeting ends by itself: it keeps a time-out.
  Outcome Wait();
  // Makes `stream` wait for the copies into this device and for those that read its weights; once, the first time.
  Status JoinOn(cudaStream_t stream);
  bool is_joined();

  const int64_t run_id;
  const int64_t ticket;
  const Addresses slots;
  // Those whose `copied` this device must wait for. The last to arrive fills them in, before `End`. They come round
  // again only when all devices that wait for them have joined.
  std::vector<std::shared_ptr<Turn>> turns;
  // Of a call between processes, numbered when the program comes to it; and the ranks that copy from this one.
  Between* between = nullptr;
  uint32_t number = 0;
  std::vector<size_t> readers;
  // Forgets the call where others look for it; for a program that fails in between.
  std::function<void()> forget = nullptr;
  // Whose tables the host has not waited for to the end, because something failed; set before `End`.
  std::shared_ptr<Turn> fetching;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Outcome> outcome_;
  bool joined_ = false;
};

// Copies that were begun and not joined. A ticket's value is in device memory, which no host reads without waiting, so
// tickets go by the address of the slots: XLA gives it to nobody else between the two calls.
PeerTickets<std::shared_ptr<Begun>>& OpenTickets();

// By the first of the slots that have an address. Weights may have no bytes, and XLA then gives none: those go by the
// device.
int64_t TicketOf(int32_t device, const Addresses& slots);

// What one call site has begun in one execution of a program on one device. XLA makes it in the initialize stage and
// ends it when the program has ended or failed, before it gives the program's buffers to others. A program may fail
// between start and join, and the copies would then write what is another program's: XLA's stream waits for them here.
class Unjoined {
 public:
  static xf::TypeId id;
  static xf::TypeInfo info;

  // words: for which `gpu` was prepared.
  Unjoined(cudaStream_t stream, Gpu* gpu, size_t words) : stream_(stream), gpu_(gpu), words_(words) {}
  ~Unjoined();
  Unjoined(const Unjoined&) = delete;
  Unjoined& operator=(const Unjoined&) = delete;

  void Add(const std::shared_ptr<Begun>& begun);

 private:
  const cudaStream_t stream_;
  Gpu* const gpu_;
  const size_t words_;
  std::vector<std::shared_ptr<Begun>> begun_;
};

// What a participant brings.
struct Brought {
  PeerShare share;
  std::shared_ptr<Turn> turn;
  std::shared_ptr<Begun> begun;
  std::shared_ptr<void> owner = nullptr;  // of the tables that the share shows, where that is not the turn
};

using Meeting = Rendezvous<Brought>;

// What the devices meet for: queues the copies of all of them.
void Copy(View<Brought> brought, const Meeting::Finish& finish);

// Queues one task on the copy stream of the device that receives it, which must be current.
Status QueueTask(const PeerTable& table, const PeerTask& task, cudaStream_t stream);

// One per call site of an executable.
struct Site {
  explicit Site(PeerAttributes given) : attributes(std::move(given)), meeting(attributes.Options(), Copy) {}

  // For the initialize stage: where ranks are processes of their own, finds the others.
  Outcome Prepare();
  // On the thread that launches the program, where all that is refused is refused alike on all devices.
  void Begin(Begun* begun) const;

  // Meets the other devices. `begun` ends with the outcome, now or later.
  void Meet(const Arrival& who, Brought brought, Status refusal);
  // A device has failed before it knew as whom it would come: nobody waits for it, and `begun` ends.
  void Fail(Begun* begun, Outcome outcome);

  const PeerAttributes attributes;
  Meeting meeting;
  std::atomic<Between*> between{nullptr};  // null: all are devices of this process
};

// Of `place`, which stands first in the pinned memory of a turn.
constexpr size_t kPlaceWords = 2;

// Takes a turn, records `ready`, and queues the fetch of `place` and of what follows it there, one after the other.
//   more_words: of pinned memory behind them.
Status QueueFetch(cudaStream_t stream, const int32_t* place, const std::vector<View<const int32_t>>& fetched,
                  size_t more_words, std::shared_ptr<Turn>* turn);

// Shows what was fetched in a share.
using Show = std::function<Status(PeerShare*)>;

// Has the device's thread wait for what is fetched, and then meet the other devices. Returns at once.
void MeetWhenFetched(const std::shared_ptr<Site>& site, xf::RunId run, int32_t device, Brought brought, Show show);

// Something failed before this device knew as whom it would come: that is in what was to be fetched.
void Abandon(Site* site, const Brought& brought, const Outcome& outcome);

// Copies on the stream what XLA could not put in the same memory, so that calls pass it on.
Status PassOn(cudaStream_t stream, const xf::AnyBuffer& in, const xf::AnyBuffer& out);

// int32 words, pinned memory on one side. There may be none, at a null pointer.
cudaError_t CopyWords(int32_t* to, const int32_t* from, size_t words, cudaMemcpyKind kind, cudaStream_t stream);

}  // namespace moe_lb::peer_cuda
