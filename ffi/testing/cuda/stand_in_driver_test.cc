// What drivers and GPUs lack or refuse: old drivers, missing functions and peer access, memory that is not shared, and
// rules of CUDA.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "ffi/common/driver_calls_cuda.h"
#include "ffi/common/driver_cuda.h"
#include "ffi/common/status.h"
#include "ffi/common/testing.h"
#include "ffi/planning/handlers.h"
#include "ffi/testing/cuda/copy_layer.h"
#include "ffi/testing/cuda/layer_runs.h"
#include "ffi/testing/cuda/memory.h"
#include "ffi/testing/cuda/stand_in.h"
#include "ffi/transport/mapped_memory_cuda.h"
#include "ffi/transport/neighbours_cuda.h"
#include "ffi/transport/peer_probe_cuda.h"

namespace {

using namespace moe_lb::testing;

// The runtime is linked statically, and an older driver does not support it.
void AnOldDriverIsNamed() {
  constexpr int kMajor = CUDART_VERSION / 1000;
  for (const int version : {0, CUDART_VERSION, kMajor * 1000, (kMajor + 1) * 1000}) {
    TheStandIn().driver_version = version;
    EXPECT(!moe_lb::CheckDriver());
  }
  TheStandIn().driver_version = (kMajor - 1) * 1000 + 40;
  const moe_lb::Status old = moe_lb::CheckDriver();
  EXPECT(old && Has(*old, "the driver here is for CUDA " + std::to_string(kMajor - 1) + ".4 and the custom calls"));
  TheStandIn().driver_version = CUDART_VERSION;
}

// Each function of the driver that processes need to copy from each other, without it.
void AMissingDriverFunctionIsNamed() {
  for (const char* const name :
       {"cuMemGetAddressRange", "cuPointerGetAttribute", "cuStreamWriteValue32", "cuStreamWaitValue32",
        "cuMemRetainAllocationHandle", "cuMemExportToShareableHandle", "cuMemImportFromShareableHandle",
        "cuMemAddressReserve", "cuMemAddressFree", "cuMemMap", "cuMemUnmap", "cuMemSetAccess", "cuMemRelease"}) {
    TheStandIn().missing_functions = {name};
    const moe_lb::Status bad = moe_lb::DriverCalls::Find().CheckBetweenProcesses();
    EXPECT(bad && Has(*bad, std::string("the driver here has no ") + name + ","));
  }
  TheStandIn().missing_functions = {};
  struct Driver {
    int version;
    bool is_there, batches, processes;
  };
  // The last one before CUDA 12, the first one, the last without batches, both forms of batches.
  for (const Driver& one :
       {Driver{0, false, false, false}, Driver{11080, false, false, false}, Driver{12000, true, false, true},
        Driver{12070, true, false, true}, Driver{12080, true, true, true}, Driver{13000, true, true, true}}) {
    TheStandIn().driver_version = one.version;
    const moe_lb::DriverCalls calls = moe_lb::DriverCalls::Find();
    EXPECT_EQ(calls.is_there(), one.is_there);
    EXPECT_EQ(!calls.CheckBatches(), one.batches);
    EXPECT_EQ(!calls.CheckBetweenProcesses(), one.processes);
    EXPECT_EQ(calls.memcpy_batch != nullptr, one.version >= 13000);
    EXPECT_EQ(calls.memcpy_batch_first != nullptr, one.version >= 12080 && one.version < 13000);
  }
  TheStandIn().driver_version = CUDART_VERSION;
}

// The functions of a driver are looked up at the first copy, so this runs in a new process.
void ADriverWithoutBatchesIsNamed() {
  TheStandIn().driver_version = 12040;
  EXPECT(Has(*moe_lb::DriverCalls::Get().CheckBatches(), "has no cuMemcpyBatchAsync"));
  EXPECT(!moe_lb::DriverCalls::Get().CheckBetweenProcesses());
  CopyLayer copies(LayerShape(), true);
  const auto gpus = Gpus(4);
  ExpectGoodRun(copies, gpus, 1);
}

// Drivers of CUDA 12.8 and 12.9 have another form of batches.
void TheFirstFormOfBatchesCopies() {
  TheStandIn().driver_version = 12080;
  EXPECT(moe_lb::DriverCalls::Get().memcpy_batch == nullptr && !moe_lb::DriverCalls::Get().CheckBatches());
  CopyLayer copies(LayerShape(), true);
  const auto gpus = Gpus(4);
  ExpectGoodRun(copies, gpus, 1);
  EXPECT(NumCalls("cuMemcpyBatchAsync") > 0);
}

void ListeningNeedsAThread() {
  std::string address;
  {
    const NoThreads none;
    const moe_lb::Status bad = moe_lb::Neighbours::OfProcess().Listen(&address);
    EXPECT(bad && Has(*bad, "no thread could be started: "));
  }
  EXPECT(!moe_lb::Neighbours::OfProcess().Listen(&address));
  EXPECT(!address.empty());
}

// No plan has them, and a quotient of them would end the process.
void SizesOfNoPlanFitNoKernel() {
  EXPECT(moe_lb::ExactKernelFits(8, 64, 10, 8, 0.01, true));
  EXPECT(moe_lb::KernelFits("ultraep", 8, 64, 10, 8) && moe_lb::KernelFits("relay", 8, 64, 10, 8));
  for (const int64_t none : {int64_t{0}, int64_t{-8}, INT64_MAX}) {
    EXPECT(!moe_lb::ExactKernelFits(none, 64, 10, 8, 0.01, true));
    EXPECT(!moe_lb::ExactKernelFits(8, none, 10, 8, 0.01, true));
    EXPECT(!moe_lb::ExactKernelFits(8, 64, none, 8, 0.01, true));
    for (const char* const planner : {"ultraep", "relay"}) {
      EXPECT(!moe_lb::KernelFits(planner, none, 64, 10, 8));
      EXPECT(!moe_lb::KernelFits(planner, 8, none, 10, 8));
      EXPECT(!moe_lb::KernelFits(planner, 8, 64, none, 8));
      EXPECT(!moe_lb::KernelFits(planner, 8, 64, 10, none == INT64_MAX ? 0 : none));
    }
  }
}

// Without machine code, kernels need a driver as new as the toolkit.
void KernelsNeedCodeOrANewDriver() {
  constexpr int kMajor = CUDART_VERSION / 1000;
  EXPECT(!moe_lb::CheckKernels(false) && !moe_lb::CheckKernels(true));
  TheStandIn().driver_version = 0;
  EXPECT(!moe_lb::CheckKernels(false));
  EXPECT_EQ(moe_lb::DriverVersion(), std::string());
  TheStandIn().driver_version = CUDART_VERSION - 10;
  EXPECT(!moe_lb::CheckKernels(true));
  const moe_lb::Status bad = moe_lb::CheckKernels(false);
  EXPECT(bad && Has(*bad, "planners run on the host"));
  TheStandIn().driver_version = kMajor * 1000 + 20;
  EXPECT_EQ(moe_lb::DriverVersion(), "CUDA " + std::to_string(kMajor) + ".2");
  TheStandIn().driver_version = CUDART_VERSION;
}

// Peer access is of an ordered pair, and a pair without it is named.
void MissingPeerAccessIsNamed() {
  EXPECT(!moe_lb::peer_cuda::CheckPeerAccess());
  TheStandIn().without_peer_access = {{5, 2}, {2, 5}};
  EXPECT_EQ(*moe_lb::peer_cuda::CheckPeerAccess(), std::string("device 2 has no peer access to device 5"));
  TheStandIn().without_peer_access = {{7, 0}};
  EXPECT_EQ(*moe_lb::peer_cuda::CheckPeerAccess(), std::string("device 7 has no peer access to device 0"));
  TheStandIn().without_peer_access = {};
}

// A pool is shared, but not memory that its allocator frees with each array, except if it outlives the free.
void MemoryFreedByArrayIsNotShared() {
  struct One {
    size_t size;
    MemoryKind kind;
    bool is_shared;
  };
  for (const One& one : {One{2 << 20, MemoryKind::kClassic, true}, One{(2 << 20) - 256, MemoryKind::kClassic, false},
                         One{4096, MemoryKind::kMapped, true}, One{2 << 20, MemoryKind::kPool, false}}) {
    const Allocation memory = NewAllocation(one.size, one.kind);
    EXPECT_EQ(cudaSetDevice(2), cudaSuccess);
    const moe_lb::Status bad = moe_lb::peer_cuda::CheckShareable(memory.begin + 8, 0);
    int device = -1;
    EXPECT_EQ(cudaGetDevice(&device), cudaSuccess);
    EXPECT_EQ(device, 2);
    EXPECT_EQ(!bad, one.is_shared);
    const char* const why =
        one.kind == MemoryKind::kPool ? "cudaIpcGetMemHandle" : "frees memory of cudaMalloc array by";
    EXPECT(one.is_shared || Has(*bad, why));
    FreeAllocation(memory);
  }
}

// Rules of CUDA that no handler breaks, shown by calls that do. In a new process, which counts its own violations.
void TheStandInRefusesWhatCudaRefuses() {
  Gpu gpu(0, 0);
  size_t violations = 0;
  const auto expect_violation = [&](const std::string& part) {
    EXPECT_EQ(Violations().size(), ++violations);
    EXPECT(Has(Violations().back(), part));
  };
  cudaEvent_t event = nullptr;
  EXPECT_EQ(cudaEventCreateWithFlags(&event, cudaEventDefault), cudaErrorInvalidValue);
  expect_violation("an event with timing");
  EXPECT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
  float ms = 0;
  EXPECT_EQ(cudaEventElapsedTime(&ms, event, event), cudaErrorInvalidResourceHandle);
  expect_violation("without timing");
  cudaStream_t stream = nullptr;
  EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamDefault), cudaErrorInvalidValue);
  expect_violation("waits for the default one");
  {
    Capture capture(gpu.stream());
    EXPECT_EQ(cudaStreamSynchronize(gpu.stream()), cudaErrorStreamCaptureUnsupported);
    expect_violation("cudaStreamSynchronize during stream capture");
    EXPECT_EQ(capture.End(), cudaErrorStreamCaptureInvalidated);
  }
  void* memory = nullptr;
  {
    Capture capture(gpu.stream());
    EXPECT_EQ(cudaHostAlloc(&memory, 64, cudaHostAllocDefault), cudaErrorStreamCaptureUnsupported);
    expect_violation("cudaHostAlloc during stream capture");
  }
  Capture capture(gpu.stream());
  // Fails, but the graph is made without the copies.
  CUdeviceptr none = 0;
  size_t zero = 0;
  moe_lb::BatchAttributes attributes = {1, {}, 1};
  EXPECT_EQ(moe_lb::DriverCalls::Get().memcpy_batch(&none, &none, &zero, 1, &attributes, &zero, 1, gpu.stream()),
            CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  expect_violation("cuMemcpyBatchAsync during stream capture");
  EXPECT_EQ(cudaEventRecord(event, gpu.stream()), cudaSuccess);
  EXPECT_EQ(capture.End(), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(event), cudaErrorCapturedEvent);
  expect_violation("of a captured event");
  EXPECT_EQ(cudaStreamWaitEvent(gpu.stream(), event, 0), cudaErrorStreamCaptureIsolation);
  expect_violation("between captured and other work");
  std::_Exit(0);
}

}  // namespace

int main(int argc, char** argv) {
  const moe_lb::TestParts parts = {
      {"driver", AnOldDriverIsNamed},
      {"functions", AMissingDriverFunctionIsNamed},
      {"kernels", KernelsNeedCodeOrANewDriver},
      {"sizes", SizesOfNoPlanFitNoKernel},
      {"listen", ListeningNeedsAThread},
      {"peer_access", MissingPeerAccessIsNamed},
      {"shareable", MemoryFreedByArrayIsNotShared},
  };
  const moe_lb::TestParts alone = {
      {"old_driver", ADriverWithoutBatchesIsNamed},
      {"first_batches", TheFirstFormOfBatchesCopies},
      {"refusals", TheStandInRefusesWhatCudaRefuses},
  };
  return RunPartsAlone(argc, argv, parts, alone);
}
