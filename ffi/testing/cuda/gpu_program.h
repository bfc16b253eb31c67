// Programs on GPUs that the stand-in plays: memory, XLA's stream, and the calls of one execution on one device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ffi/testing/cuda/memory.h"
#include "ffi/testing/fake_xla.h"
#include "ffi/testing/handler_calls.h"

namespace moe_lb::testing {

// A device as XLA has it. Memory is freed by the host at once and given out again at once, for work that XLA's stream
// does later: what other streams still do with it must be over when XLA's stream comes to its next user.
class Gpu {
 public:
  // ordinal: XLA's number of the device; cuda_device: CUDA's, the same for logical devices that share a GPU.
  // With memory that other processes can map, if `shared` says so.
  Gpu(int32_t ordinal, int cuda_device, std::optional<MemoryKind> shared = std::nullopt);
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  DeviceArray New(XLA_FFI_DataType dtype, std::vector<int64_t> dims);
  void Free(const DeviceArray& array);

  // Gives all shared memory back and takes as much at the same addresses. No program may run.
  void ReallocateShared();

  int32_t ordinal() const { return ordinal_; }
  int cuda_device() const { return cuda_device_; }
  cudaStream_t stream() const { return stream_; }

 private:
  const int32_t ordinal_;
  const int cuda_device_;
  cudaStream_t stream_ = nullptr;
  void* Allocate(size_t size);

  const std::optional<MemoryKind> kind_;
  Allocation shared_;  // arrays are cut out of it, as XLA does
  size_t used_ = 0;
  std::vector<void*> all_;
  std::map<size_t, std::vector<void*>> free_;  // by size, which is exact: sanitizers see every byte beyond
};

// One execution of a program on one device, on the thread that launches it. `Add` makes every call's initialize stage,
// all before the first `Execute`, as XLA does. Its end ends what they made, and frees the program's memory.
class Program {
 public:
  Program(Gpu& gpu, int64_t run_id);
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // Memory that lives until the program's end.
  DeviceArray New(XLA_FFI_DataType dtype, std::vector<int64_t> dims);

  Invocation& Add(CallSite& site, DeviceArrays args, DeviceArrays rets);

  // Calls the handler; after an error nothing is called any more, as in XLA.
  void Execute(Invocation& invocation);
  void Launch(std::function<void()> kernel);
  // XLA waits so for the predicate of each round of a loop.
  void BlockHost();

  // The first error of a handler; empty: there was none.
  const Ending& ending() const { return ending_; }
  Gpu& gpu() { return gpu_; }

 private:
  Gpu& gpu_;
  const int64_t run_id_;
  std::vector<std::unique_ptr<Invocation>> invocations_;
  DeviceArrays arrays_;
  Ending ending_;
};

// Registered once for the process, with all parts of the CUDA handlers.
FakeXla& CudaXla();
HandlerRegistration CudaHandler(const std::string& name);

// Calls `on_device(i)` for all devices, each on a thread of its own, and waits for them.
void OnAll(int64_t num_devices, const std::function<void(int64_t device)>& on_device);

// As many devices, and their GPUs.
std::vector<std::unique_ptr<Gpu>> Gpus(int64_t count);

inline int32_t* Int32s(const DeviceArray& array) { return static_cast<int32_t*>(array.data); }
inline unsigned char* Bytes(const DeviceArray& array) { return static_cast<unsigned char*>(array.data); }

}  // namespace moe_lb::testing
