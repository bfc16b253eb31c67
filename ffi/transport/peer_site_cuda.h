// Where GPUs of one process meet to copy weights: what all calls that copy share.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "ffi/transport/peer_operands.h"
#include "ffi/transport/peer_tickets.h"

namespace moe_lb::peer_cuda {

inline Status Cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return Ok();
  return Refuse(what, ": ", cudaGetErrorName(error), ": ", cudaGetErrorString(error));
}

// Runs the calls up to the first that fails.
#define MOE_LB_CUDA(call)                               \
  do {                                                  \
    if (Status bad_ = Cuda((call), #call)) return bad_; \
  } while (false)

// An event that is destroyed with its owner. It takes no times, because nobody asks for them and events with times are
// slower.
class Event {
 public:
  Event() = default;
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&&) = delete;
  ~Event() {
    // A process that ends may have closed CUDA already, and nothing is left to be told.
    if (event_ != nullptr) static_cast<void>(cudaEventDestroy(event_));
  }
  Status Make() {
    if (event_ != nullptr) return Ok();
    MOE_LB_CUDA(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
    return Ok();
  }
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

// What one start uses on one device.
struct Turn {
  Event ready;                  // XLA's stream has made the weights and freed the slots
  Event tables;                 // `host` holds what was fetched
  Event copied;                 // all copies into this device are done
  std::vector<Event> forwards;  // tasks that other devices wait for
  int32_t* host = nullptr;      // pinned
};

// The copy stream of a call site on one device, and a ring of turns. A turn that comes round again records its events
// anew on the same stream, after the old ones: whoever still waits for them waits a little longer, not too short.
class Lane {
 public:
  static constexpr size_t kNumTurns = 16;

  ~Lane() {
    if (stream_ != nullptr) static_cast<void>(cudaStreamDestroy(stream_));
    if (host_ != nullptr) static_cast<void>(cudaFreeHost(host_));
  }

  // words: int32 that a turn has pinned.
  Status Make(size_t words) {
    words_ = words;
    // Without the flag the stream would wait for the default stream, and with it for work that has nothing to do with
    // the copies.
    MOE_LB_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    void* memory = nullptr;
    // The memory is pinned, because a copy to other memory would make the launching thread wait for the stream.
    MOE_LB_CUDA(cudaHostAlloc(&memory, kNumTurns * words * sizeof(int32_t), cudaHostAllocPortable));
    host_ = static_cast<int32_t*>(memory);
    for (size_t i = 0; i < kNumTurns; ++i) {
      turns_[i].host = host_ + i * words;
      for (Event* event : {&turns_[i].ready, &turns_[i].tables, &turns_[i].copied}) {
        if (Status bad = event->Make()) return bad;
      }
    }
    return Ok();
  }

  // Needs no lock: XLA launches what runs on a device from one thread at a time.
  Turn* Next() { return &turns_[next_++ % kNumTurns]; }
  cudaStream_t stream() const { return stream_; }
  size_t words() const { return words_; }

 private:
  cudaStream_t stream_ = nullptr;
  int32_t* host_ = nullptr;
  size_t words_ = 0;
  size_t next_ = 0;
  std::array<Turn, kNumTurns> turns_;
};

// What a participant brings, and what the last to arrive tells it.
struct Brought {
  PeerShare share;
  Lane* lane = nullptr;
  Turn* turn = nullptr;
  std::vector<cudaEvent_t>* waits = nullptr;  // for `copy_join`
};

using Meeting = Rendezvous<Brought>;

// What the devices meet for: queues the copies of all of them.
void Copy(View<Brought> brought, Meeting::Finish finish);

// One per call site of an executable.
struct Site {
  static xf::TypeId id;
  static xf::TypeInfo info;

  explicit Site(PeerAttributes given) : attributes(std::move(given)), meeting(attributes.Options(), Copy) {}

  // The lane of the current device.
  Status LaneOf(int device, size_t words, Lane** lane) {
    const std::lock_guard<std::mutex> lock(mutex);
    std::unique_ptr<Lane>& found = lanes[device];
    if (found == nullptr) {
      auto fresh = std::make_unique<Lane>();
      if (Status bad = fresh->Make(words)) return bad;
      found = std::move(fresh);
    }
    *lane = found.get();
    return CheckSame("pinned words", words, found->words());
  }

  const PeerAttributes attributes;
  Meeting meeting;
  std::mutex mutex;
  std::map<int, std::unique_ptr<Lane>> lanes;
};
// What `copy_join` must know. A ticket's value is in device memory, which no host reads without waiting, so tickets go
// by the address of the slots: XLA gives it to nobody else between the two calls.
struct Note {
  std::vector<const void*> slots;
  std::vector<cudaEvent_t> waits;
};

PeerTickets<Note>& OpenTickets();

// By the first of the slots' addresses.
int64_t TicketOf(const std::vector<const void*>& slots);

}  // namespace moe_lb::peer_cuda
