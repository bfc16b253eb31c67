// Programs on stand-in GPUs: memory, XLA's stream, and the calls of one execution on one device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ffi/common/testing.h"
#include "ffi/testing/cuda/memory.h"
#include "ffi/testing/fake_xla.h"
#include "ffi/testing/handler_calls.h"

namespace moe_lb::testing {

inline void ExpectOk(const Ending& ending) { EXPECT_EQ(ending.message, std::string()); }

// A device as in XLA. The host frees and reuses memory at once, for later work on XLA's stream. Uses by other streams
// must end before XLA's stream reaches the next user.
class Gpu {
 public:
  // ordinal: XLA's number of the device; cuda_device: CUDA's, equal for logical devices sharing a GPU. shared: kind
  // of memory mappable by other processes; none by default.
  Gpu(int32_t ordinal, int cuda_device, std::optional<MemoryKind> shared = std::nullopt);
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  DeviceArray New(XLA_FFI_DataType dtype, std::vector<int64_t> dims);
  void Free(const DeviceArray& array);

  // Frees all shared memory and allocates it again at the same addresses. No program may run.
  void ReallocateShared();
  // Frees all shared memory and allocates other. No program may run.
  void MoveShared();

  int32_t ordinal() const { return ordinal_; }
  int cuda_device() const { return cuda_device_; }
  cudaStream_t stream() const { return stream_; }

 private:
  const int32_t ordinal_;
  const int cuda_device_;
  cudaStream_t stream_ = nullptr;
  void* Allocate(size_t size);

  const std::optional<MemoryKind> kind_;
  Allocation shared_;  // contains the arrays, as in XLA
  size_t used_ = 0;
  std::vector<void*> all_;
  std::map<size_t, std::vector<void*>> free_;  // by exact size, so that sanitizers detect overruns
};

// One execution of a program on one device, on the launching thread. `Add` runs the initialize stage of a call; make
// all calls of `Add` before the first `Execute`, as XLA does. The destructor destroys their states and frees the
// program's memory.
class Program {
 public:
  Program(Gpu& gpu, int64_t run_id);
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // Allocates memory until the program's end.
  DeviceArray New(XLA_FFI_DataType dtype, std::vector<int64_t> dims);

  Invocation& Add(CallSite& site, DeviceArrays args, DeviceArrays rets);

  // Calls the handler, unless an earlier call failed, as in XLA.
  void Execute(Invocation& invocation);
  void Launch(std::function<void()> kernel);
  // Blocks the host until the stream is idle, as XLA does for the predicate of each loop iteration.
  void BlockHost();

  // The first error of a handler; ok if there was none.
  const Ending& ending() const { return ending_; }
  Gpu& gpu() { return gpu_; }

 private:
  Gpu& gpu_;
  const int64_t run_id_;
  std::vector<std::unique_ptr<Invocation>> invocations_;
  DeviceArrays arrays_;
  Ending ending_;
};

// The process-wide runtime with all CUDA handlers registered.
FakeXla& CudaXla();
HandlerRegistration CudaHandler(const std::string& name);

// Calls `on_device(i)` for all devices, each on its own thread, and waits for them.
void OnAll(int64_t num_devices, const std::function<void(int64_t device)>& on_device);

// Makes `count` devices and their GPUs.
std::vector<std::unique_ptr<Gpu>> Gpus(int64_t count);

inline int32_t* Int32s(const DeviceArray& array) { return static_cast<int32_t*>(array.data); }
inline unsigned char* Bytes(const DeviceArray& array) { return static_cast<unsigned char*>(array.data); }

}  // namespace moe_lb::testing
