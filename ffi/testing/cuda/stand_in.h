// A stand-in for the CUDA runtime, to run the GPU handlers without a GPU. It implements the functions they call on
// threads (streams.h) and ordinary memory. Linked instead of cudart, with the same object files of the handlers.
//
// Not implemented: GPU kernels (tests launch functions instead), graphs of several streams, and timing.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace moe_lb::testing {

// Options of the stand-in. Set them while no work is queued.
struct StandIn {
  int num_devices = 8;
  // The machine's numbers of this process's devices, as CUDA_VISIBLE_DEVICES orders them; empty: 0, 1, ...
  std::vector<int> visible;
  int64_t longest_delay_us = 0;             // maximum random delay before each operation of a stream
  int64_t copy_us = 0;                      // duration of a batch of copies, and of a copy between devices
  bool allocation_waits = false;            // pinned (de)allocation synchronizes all devices, as CUDA may do
  int driver_version = 13000;               // 0: no driver
  bool batches_are_supported = true;        // false: a driver without batches of copies
  std::set<std::string> missing_functions;  // of the driver
  // Pairs (reader, owner) of the machine's devices without peer access.
  std::set<std::pair<int, int>> without_peer_access;
  int64_t fetch_us = 0;         // duration of a copy to the host
  bool failures_throw = false;  // failed calls throw instead, as an allocation of the handlers between calls may
};

StandIn& TheStandIn();

// Fails `count` calls of `function` after `after` more successful ones; an empty name: no calls. A failed call has no
// effect.
void FailCalls(const std::string& function, int64_t after, cudaError_t error, int64_t count = 1);

// Runs a function on a stream, as XLA launches a kernel. Not included in the counts of calls.
void Launch(cudaStream_t stream, std::function<void()> kernel);

// The error of a kernel that runs, called by the kernel: it shows at a later call, of any thread, and at all from then
// on.
void Corrupt(cudaError_t error);

// Records the work of a stream instead of running it, as XLA does to make a graph, from this to `End`. Calls of this
// thread that CUDA does not allow meanwhile fail and end the capture.
class Capture {
 public:
  explicit Capture(cudaStream_t stream);
  ~Capture();
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  cudaError_t End();
  // Queues the recorded work on the stream, any number of times.
  void Replay() const;

 private:
  const cudaStream_t stream_;
  bool ended_ = false;
  std::vector<std::function<void()>> recorded_;
};

// Waits for a stream without a runtime call, like the end of a program.
void Synchronize(cudaStream_t stream);

// Marks this thread as executing a program: creating pinned memory or streams is then a violation.
class Executing {
 public:
  Executing();
  ~Executing();
};

// ---- recorded calls ----------------------------------------------------------------

// Violations of CUDA's rules, one line each.
std::vector<std::string> Violations();

// Devices with a context of this process, of hundreds of megabytes each on a GPU.
std::set<int> Contexts();

int64_t NumStreams();
int64_t NumEvents();
int64_t PinnedBytes();
int64_t NumCalls(const std::string& function);

// ---- ignored calls -----------------------------------------------------------------
// Each wait, record and query of the handlers must be necessary: without it a test must fail. So the stand-in can
// ignore the calls of one place in the code: they return success without an effect.

struct CallPlace {
  const char* function;
  const void* returns_to;
};

// Returns the places of all ordering calls so far.
std::vector<CallPlace> OrderingCalls();
void Ignore(const CallPlace& place);

}  // namespace moe_lb::testing
