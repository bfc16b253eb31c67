// A CPU planner in a CUDA stream: copies to the host, a host function, copies back. No thread waits for the GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <mutex>

#include "ffi/planning/planners.h"
#include "xla/ffi/api/ffi.h"

namespace moe_lb {

class PlannerRing;

// State of one call site: pinned memory per device for several queued calls, shared with all call sites of calls of the
// same size. The host function of a call cannot return an error to CUDA: it sets the status word and writes the reason
// to stderr.
class HostScheduler {
 public:
  static xla::ffi::TypeId id;

  HostScheduler();
  ~HostScheduler();  // the last call site sharing this memory waits for queued calls

  // Allocates pinned memory for calls of `words` int32 on the current device, status included. Call it in the
  // initialize stage: CUDA may synchronize all devices before it returns pinned memory, and devices of a running
  // program may be waiting for each other.
  xla::ffi::Error Prepare(size_t words);

  // Queues `call` on the stream of the current device. Its arrays are device memory, valid while the stream
  // uses it; `status` is one word of it. All calls have arrays of the same sizes. Blocks only if all slots of the ring
  // are in flight; returns DeadlineExceeded if they stay so.
  xla::ffi::Error Enqueue(cudaStream_t stream, PlannerCall call, int32_t* status);

 private:
  std::mutex mutex_;
  std::map<int, std::shared_ptr<PlannerRing>> rings_;  // by device
};

}  // namespace moe_lb
