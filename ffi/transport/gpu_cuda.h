// Streams, events and pinned memory of one GPU for expert copies, shared by all programs of the process.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ffi/common/status.h"

namespace moe_lb::peer_cuda {

inline Status Cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return Ok();
  return Problem(std::string(what) + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error), true);
}

// Runs the calls up to the first failure.
#define MOE_LB_CUDA(call)                                                    \
  do {                                                                       \
    if (Status bad_ = ::moe_lb::peer_cuda::Cuda((call), #call)) return bad_; \
  } while (false)

// Sets the device of this thread, and restores it: the caller is Python's thread.
class OnDevice {
 public:
  explicit OnDevice(int device) : bad_(Cuda(cudaGetDevice(&before_), "cudaGetDevice")) {
    if (!bad_) bad_ = Cuda(cudaSetDevice(device), "cudaSetDevice");
  }
  ~OnDevice() { static_cast<void>(cudaSetDevice(before_)); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  const Status& bad() const { return bad_; }

 private:
  int before_ = 0;
  Status bad_;
};

// An event, destroyed with its owner. Timing is disabled because events with timing are slower.
class Event {
 public:
  Event() = default;
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&&) = delete;
  ~Event() {
    // The error is ignored: CUDA may already be shut down when the process exits.
    if (event_ != nullptr) static_cast<void>(cudaEventDestroy(event_));
  }
  // Creates the event on the current device.
  Status Make() {
    if (event_ != nullptr) return Ok();
    MOE_LB_CUDA(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
    return Ok();
  }
  cudaEvent_t get() const { return event_; }
  // Waits on the host until the last record is complete, or sets `is_late` after the time-out.
  Status Await(double timeout_s, bool* is_late) const;

 private:
  cudaEvent_t event_ = nullptr;
};

class Gpu;

// Events and pinned memory of one `copy_start` or `copy_post` on one device, in use until the last wait for its events.
// An event may be recorded again while a stream still waits for its previous record: CUDA binds a wait to the record
// that precedes it in the queue.
struct LaunchResources {
  Gpu* gpu = nullptr;
  Event ready;                  // XLA's stream has computed the weights and the tables, and freed the slots
  Event tables;                 // the fetch into `host` is complete
  Event copied;                 // all copies into this device are complete
  Event uploaded;               // XLA's stream has completed its reads of `host`
  std::vector<Event> forwards;  // one per task awaited by other devices
  int32_t* host = nullptr;      // pinned
  size_t words = 0;             // of `host`
};

// A GPU: one stream for copies, one for fetches, and a pool of `LaunchResources`. Thread-safe.
//
// Two streams serve all call sites. Queued work waits only for work queued before it, so shared streams cannot
// deadlock. Fetches have a separate stream because the host waits for them, and they must not wait for the copies of an
// earlier call.
class Gpu {
 public:
  // Launch resources allocated per size at the first `Prepare`, for programs launched in quick succession.
  static constexpr size_t kNumLaunchResources = 8;

  // Returns the current device in `gpu`; the first call creates its streams.
  static Status Current(Gpu** gpu);

  // Allocates launch resources of `words` int32 until there are kNumLaunchResources, or as many as call sites of that
  // size in programs that are being launched, because all their calls may be in flight at once. Resources in use count.
  // Call it in the initialize stage: CUDA may synchronize all devices before it returns pinned memory, and devices of a
  // running program may be waiting for each other.
  Status Prepare(size_t words);
  // Ends the launch of a program with a call site for which `Prepare(words)` was called.
  void Launched(size_t words);

  // Returns idle launch resources, which return to the pool when the last reference is dropped. Allocates new ones if
  // the device still reads all those of earlier programs, because a wait here could deadlock.
  Status Take(size_t words, std::shared_ptr<LaunchResources>* resources);

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
  std::vector<size_t> sizes_;                           // words of all launch resources
  std::multiset<size_t> launching_;                     // words of call sites in programs being launched
  std::vector<std::unique_ptr<LaunchResources>> free_;  // in the order of their return
};

}  // namespace moe_lb::peer_cuda
