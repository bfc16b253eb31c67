// What copies use on one GPU: streams, events and pinned memory, for all programs of the process.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "ffi/common/status.h"

namespace moe_lb::peer_cuda {

inline Status Cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return Ok();
  return Problem(std::string(what) + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error), true);
}

// Runs the calls up to the first that fails.
#define MOE_LB_CUDA(call)                                                    \
  do {                                                                       \
    if (Status bad_ = ::moe_lb::peer_cuda::Cuda((call), #call)) return bad_; \
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
  // For streams of the device that is current.
  Status Make() {
    if (event_ != nullptr) return Ok();
    MOE_LB_CUDA(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
    return Ok();
  }
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

class Gpu;

// What one start or post uses on one device, from then until nobody waits for its events any more. An event may be
// recorded again while a stream still waits for its last record: a wait is for the record that was there when it was
// queued.
struct Turn {
  Gpu* gpu = nullptr;
  Event ready;                  // XLA's stream has made the weights and the tables, and freed the slots
  Event tables;                 // `host` holds what was fetched
  Event copied;                 // all copies into this device are done
  Event uploaded;               // XLA's stream has read what it reads of `host`
  std::vector<Event> forwards;  // tasks that other devices wait for
  int32_t* host = nullptr;      // pinned
  size_t words = 0;             // of `host`
};

// A GPU: a stream for copies, one for fetches, and the turns. Threads: any.
//
// Two streams are enough for all call sites. Whatever is queued waits only for what was queued before it, so streams
// that several calls share cannot wait for each other in a circle. Fetches have a stream of their own, because the host
// waits for them, and they must not wait for the copies of an earlier call.
class Gpu {
 public:
  // Turns of a size that there are from the start, for programs that follow each other closely.
  static constexpr size_t kNumTurns = 8;

  // The device that is current; its streams are made at the first call.
  static Status Current(Gpu** gpu);

  // Makes turns of `words` int32 if there are fewer than kNumTurns, or than call sites of that size in programs that
  // are being launched: all their calls may be under way at once. Those in use are counted. For the initialize stage of
  // a call site: CUDA may let all devices finish before it gives pinned memory, and while a program runs they may be
  // waiting for each other.
  Status Prepare(size_t words);
  // A program with a call site for which that was done has been launched to its end.
  void Launched(size_t words);

  // A turn that nothing uses any more. It comes back by itself. A new one is made only where the device lags so far
  // behind that it still reads those of programs before; to wait for it here could be to wait for ever.
  Status Take(size_t words, std::shared_ptr<Turn>* turn);

  int device() const { return device_; }
  cudaStream_t copies() const { return copies_; }
  cudaStream_t fetches() const { return fetches_; }

 private:
  explicit Gpu(int device) : device_(device) {}

  Status MakeStreams();
  Status Add(size_t words);  // with the lock held

  const int device_;
  cudaStream_t copies_ = nullptr;
  cudaStream_t fetches_ = nullptr;
  std::mutex mutex_;
  std::vector<size_t> sizes_;                // of all turns
  std::multiset<size_t> launching_;          // words of call sites in programs that are being launched
  std::vector<std::unique_ptr<Turn>> free_;  // those that came back last stand last
};

}  // namespace moe_lb::peer_cuda
