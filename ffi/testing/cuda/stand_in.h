// A stand-in for the CUDA runtime, so that the handlers of GPUs run where there is none: the functions that they call,
// on threads (streams.h) and ordinary memory. Linked instead of cudart, with the same objects of the handlers.
//
// Not played: kernels of the GPU's own (tests launch functions instead), graphs, and how long anything takes.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace moe_lb::testing {

// What the stand-in does. Set it while no work is queued.
struct StandIn {
  int num_devices = 8;
  int64_t longest_delay_us = 0;       // before everything that a stream does, at random
  int64_t copy_us = 0;                // how long a batch of copies takes, and a copy between devices
  bool allocation_waits = false;      // pinned memory is given and taken only when all devices are idle, as CUDA may do
  int driver_version = 13000;         // 0: there is no driver
  bool batches_are_supported = true;  // false: a driver that does not know batches of copies
};

StandIn& TheStandIn();

// Fails the calls of `function` that come after `after` more of them; an empty name: no calls. A failed call does
// nothing.
void FailCalls(const std::string& function, int64_t after, cudaError_t error, int64_t count = 1);

// Runs a function on a stream, as XLA launches a kernel. It takes no part in the counts of calls.
void Launch(cudaStream_t stream, std::function<void()> kernel);

// As a program that ends its work would, without a call of the runtime's.
void Synchronize(cudaStream_t stream);

// While one lives, a program runs on this thread: pinned memory or streams that it makes are a violation.
class Executing {
 public:
  Executing();
  ~Executing();
};

// ---- what was called ---------------------------------------------------------------

// What a program did that CUDA forbids, one line each.
std::vector<std::string> Violations();

int64_t NumStreams();
int64_t NumEvents();
int64_t PinnedBytes();
int64_t NumCalls(const std::string& function);

// ---- calls that are left out -------------------------------------------------------
// Removing a wait, a record or a host's question from the handlers must make a test fail. So the stand-in can ignore
// one place of the code that makes such a call: it returns success and does nothing.

struct CallPlace {
  const char* function;
  const void* returns_to;
};

// Those that ordering calls have been made from, by then.
std::vector<CallPlace> OrderingCalls();
void Ignore(const CallPlace& place);

}  // namespace moe_lb::testing
