// A CPU planner inside a CUDA stream: copies to the host, a host function, copies back. Nothing waits for the GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <mutex>

#include "ffi/planning/planners.h"
#include "xla/ffi/api/ffi.h"

namespace moe_lb {

class PlannerRing;

// The state of one call site: on each device that it runs on, pinned memory for several calls that are queued at a
// time, shared with all call sites whose calls have as many numbers. The host function of a call cannot tell CUDA that
// it failed: it sets the status word and writes the reason to stderr.
class HostScheduler {
 public:
  static xla::ffi::TypeId id;

  HostScheduler();
  ~HostScheduler();  // the last of those that share memory waits for calls that are still queued

  // Allocates for calls of `words` int32 on the current device, status included. For the initialize stage: CUDA may let
  // all devices finish before it gives pinned memory, and while a program runs they may be waiting for each other.
  xla::ffi::Error Prepare(size_t words);

  // Queues `call` on the stream of the current device. Its arrays are device memory that stays valid
  // while the stream works on it; `status` is one word of it. Every call has arrays of the same sizes.
  // Waits only if the device is as many calls behind as the ring has slots; DeadlineExceeded if it
  // stays so.
  xla::ffi::Error Enqueue(cudaStream_t stream, PlannerCall call, int32_t* status);

 private:
  std::mutex mutex_;
  std::map<int, std::shared_ptr<PlannerRing>> rings_;  // by device
};

}  // namespace moe_lb
