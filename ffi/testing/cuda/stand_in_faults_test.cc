// Failures on the stand-in: failed calls of the runtime, programs failing between two calls, and devices that wait
// for each other.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "ffi/common/driver_calls_cuda.h"
#include "ffi/common/driver_cuda.h"
#include "ffi/common/testing.h"
#include "ffi/testing/cuda/copy_layer.h"
#include "ffi/testing/cuda/layer_weights.h"
#include "ffi/testing/cuda/memory.h"
#include "ffi/testing/cuda/planned_layer.h"
#include "ffi/testing/cuda/rows_layer.h"
#include "ffi/testing/cuda/stand_in.h"
#include "ffi/transport/mapped_memory_cuda.h"
#include "ffi/transport/peer_probe_cuda.h"

namespace {

using namespace moe_lb::testing;
using Clock = std::chrono::steady_clock;

bool Has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

double SecondsSince(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// Runs one execution of a layer on all devices; returns the ending on each.
template <typename Layer>
std::vector<Ending> RunOnce(Layer& layer, const std::vector<std::unique_ptr<Gpu>>& gpus, int64_t run,
                            const Between& between = {}) {
  std::vector<Ending> endings(gpus.size());
  OnAll(static_cast<int64_t>(gpus.size()), [&](int64_t device) {
    const auto at = static_cast<size_t>(device);
    endings[at] = layer.Run(*gpus[at], device, run, between);
  });
  for (const auto& gpu : gpus) Synchronize(gpu->stream());
  return endings;
}

template <typename Layer>
void ExpectGoodRun(Layer& layer, const std::vector<std::unique_ptr<Gpu>>& gpus, int64_t run) {
  for (const Ending& ending : RunOnce(layer, gpus, run)) EXPECT_EQ(ending.message, std::string());
  EXPECT_EQ(layer.num_wrong(), 0);
}

// XLA reuses the buffers if a program fails between two calls. `UseMemoryAgain` detects copies still running.
template <typename Layer>
void NoWritesAfterAFailure(Layer& layer) {
  const auto gpus = Gpus(4);
  TheStandIn().copy_us = 4000;
  Between between;
  between.fails = true;
  for (int64_t run = 1; run <= 5; ++run) {
    for (const Ending& ending : RunOnce(layer, gpus, run, between)) EXPECT_EQ(ending.message, std::string());
    EXPECT_EQ(layer.num_wrong(), 0);
  }
  TheStandIn().copy_us = 0;
  ExpectGoodRun(layer, gpus, 6);
}

// XLA may rematerialize weights: the copies have then not waited for them.
void AnotherHomeIsRefused() {
  const auto gpus = Gpus(4);
  PlannedLayer layer{LayerShape()};
  Between between;
  between.other_home = true;
  for (const Ending& ending : RunOnce(layer, gpus, 1, between)) {
    EXPECT_EQ(ending.code, XLA_FFI_Error_Code_INVALID_ARGUMENT);
    EXPECT(Has(ending.message, "home is not the buffers that post was given"));
  }
  ExpectGoodRun(layer, gpus, 2);
}

// One runtime call fails on one device: all devices fail soon, with its message, as an internal error, and the next
// execution is correct.
template <typename Layer>
void OneFailureEndsAll(Layer& layer, const std::string& function, int64_t after) {
  const auto gpus = Gpus(4);
  ExpectGoodRun(layer, gpus, 1000);
  FailCalls(function, after, cudaErrorIllegalAddress);
  const Clock::time_point begin = Clock::now();
  for (const Ending& ending : RunOnce(layer, gpus, 1001)) {
    EXPECT_EQ(ending.code, XLA_FFI_Error_Code_INTERNAL);
    EXPECT(Has(ending.message, "cudaErrorIllegalAddress"));
  }
  EXPECT(SecondsSince(begin) < 5);
  FailCalls("", 0, cudaSuccess);
  ExpectGoodRun(layer, gpus, 1002);
}

// The tables of one device never reach the host: the wait ends by its time-out, and the others fail too.
template <typename Layer>
void ADeviceThatIsStuckIsNamed() {
  LayerShape shape;
  shape.timeout_s = 1;
  Layer layer = [&] {
    if constexpr (std::is_same_v<Layer, CopyLayer>) {
      return Layer(shape, false);
    } else {
      return Layer(shape);
    }
  }();
  const auto gpus = Gpus(4);
  ExpectGoodRun(layer, gpus, 1);
  std::atomic<bool> stuck{true};
  Launch(gpus[2]->stream(), [&] {
    while (stuck) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  std::thread release([&] {
    std::this_thread::sleep_for(std::chrono::seconds(5));
    stuck = false;
  });
  std::vector<Ending> endings(4);
  const Clock::time_point begin = Clock::now();
  OnAll(4, [&](int64_t device) {
    const auto at = static_cast<size_t>(device);
    endings[at] = layer.Run(*gpus[at], device, 2);
  });
  // No host thread waits for the stuck device.
  EXPECT(stuck);
  EXPECT(SecondsSince(begin) < 10);
  release.join();
  for (const auto& gpu : gpus) Synchronize(gpu->stream());
  for (const Ending& ending : endings) {
    EXPECT_EQ(ending.code, XLA_FFI_Error_Code_DEADLINE_EXCEEDED);
    // A device waiting as long as the stuck one may time out first.
    EXPECT(Has(ending.message, "device 2 did not bring its tables") || Has(ending.message, "missing ranks: 2"));
  }
  ExpectGoodRun(layer, gpus, 3);
}

// Also in the first execution: the stand-in records an allocation while a handler executes.
void NoAllocationWhileAProgramRuns() {
  const auto gpus = Gpus(2);
  LayerShape shape;
  shape.ranks = 2;
  shape.home = 37;  // a size unique to this test
  CopyLayer copies(shape, false);
  PlannedLayer planned(shape);
  HostPlan plan(shape);
  const int64_t before = NumCalls("cudaHostAlloc");
  OnAll(2, [&](int64_t rank) {
    Gpu& gpu = *gpus[static_cast<size_t>(rank)];
    EXPECT_EQ(copies.Run(gpu, rank, 1).message, std::string());
    EXPECT_EQ(plan.Run(gpu, 1).message, std::string());
    EXPECT_EQ(planned.Run(gpu, rank, 1).message, std::string());
    Synchronize(gpu.stream());
  });
  EXPECT(NumCalls("cudaHostAlloc") > before);
  for (const std::string& violation : Violations()) EXPECT_EQ(violation, std::string());
}

// The first execution allocates in the initialize stage: XLA launches no handler before all devices have passed it.
void AllocationDoesNotStopACollective() {
  const auto gpus = Gpus(2);
  LayerShape shape;
  shape.ranks = 2;
  shape.home = 41;
  HostPlan plan(shape);
  std::atomic<int> initialized{0}, here{0}, done{0};
  TheStandIn().allocation_waits = true;
  plan.before_execute = [&](Program& program) {
    ++initialized;
    while (initialized < 2) std::this_thread::yield();
    // The other device's program continues later: its part of the collective is not queued when this handler runs.
    if (program.gpu().ordinal() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    program.Launch([&] {
      ++here;
      while (here < 2) std::this_thread::sleep_for(std::chrono::microseconds(100));
    });
  };
  std::thread watch([&] {
    for (int i = 0; i < 200 && done < 2; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_EQ(done.load(), 2);
  });
  OnAll(2, [&](int64_t rank) {
    Gpu& gpu = *gpus[static_cast<size_t>(rank)];
    EXPECT_EQ(plan.Run(gpu, 1).message, std::string());
    Synchronize(gpu.stream());
    ++done;
  });
  watch.join();
  EXPECT_EQ(plan.num_wrong(), 0);
  TheStandIn().allocation_waits = false;
}

// Ends the process of a part without a check of leaks: handlers keep memory that a device may still write.
[[noreturn]] void EndWithKeptMemory() {
  for (const std::string& violation : Violations()) EXPECT_EQ(violation, std::string());
  std::_Exit(0);
}

// The end of the work on a slot whose event was not recorded is unknown: it is not used again, and its memory not
// freed.
void AFailedRecordRetiresItsSlot() {
  const auto gpus = Gpus(1);
  LayerShape shape;
  shape.home = 43;  // a size unique to this test
  auto plan = std::make_unique<HostPlan>(shape);
  const auto wrong = plan->wrong();
  const int64_t before = PinnedBytes();
  EXPECT_EQ(plan->Run(*gpus[0], 1).message, std::string());
  const int64_t pinned = PinnedBytes();
  EXPECT(pinned > before);
  FailCalls("cudaEventRecord", 0, cudaErrorIllegalAddress);
  const Ending ending = plan->Run(*gpus[0], 2);
  FailCalls("", 0, cudaSuccess);
  EXPECT_EQ(ending.code, XLA_FFI_Error_Code_INTERNAL);
  EXPECT(Has(ending.message, "cudaEventRecord"));
  // More calls than slots, in the others.
  for (int64_t run = 3; run <= 80; ++run) EXPECT_EQ(plan->Run(*gpus[0], run).message, std::string());
  Synchronize(gpus[0]->stream());
  EXPECT_EQ(wrong->load(), 0);
  const Clock::time_point begin = Clock::now();
  plan.reset();
  EXPECT(SecondsSince(begin) < 5);
  EXPECT_EQ(PinnedBytes(), pinned);
  EndWithKeptMemory();
}

// The last call site of a size frees its memory and events.
void APlannerFreesItsMemory() {
  const auto gpus = Gpus(1);
  LayerShape shape;
  shape.home = 47;  // a size unique to this test
  auto plan = std::make_unique<HostPlan>(shape);
  const int64_t pinned = PinnedBytes(), events = NumEvents();
  EXPECT_EQ(plan->Run(*gpus[0], 1).message, std::string());
  EXPECT(PinnedBytes() > pinned && NumEvents() > events);
  Synchronize(gpus[0]->stream());
  plan.reset();
  EXPECT_EQ(PinnedBytes(), pinned);
  EXPECT_EQ(NumEvents(), events);
}

// The numbers of streams and pinned bytes do not grow with the number of layers of an executable.
void CallSitesShareStreams() {
  const auto gpus = Gpus(4);
  std::vector<std::unique_ptr<CopyLayer>> layers;
  const auto run_layers = [&](size_t count) {
    while (layers.size() < count) {
      layers.push_back(std::make_unique<CopyLayer>(LayerShape(), true));
      ExpectGoodRun(*layers.back(), gpus, static_cast<int64_t>(layers.size()));
    }
  };
  run_layers(1);
  const int64_t streams = NumStreams(), events = NumEvents(), pinned = PinnedBytes();
  run_layers(60);
  EXPECT_EQ(NumStreams(), streams);
  EXPECT_EQ(PinnedBytes(), pinned);
  // Launch resources create their relay events at the first use; each of 4 devices has 8 of them.
  EXPECT(NumEvents() - events <= 4 * 8 * 10);
}

// Two threads launch the same executable on one device, as two Python threads may.
void TwoThreadsLaunchOnOneDevice() {
  LayerShape shape;
  shape.ranks = 1;
  CopyLayer copies(shape, false);
  PlannedLayer planned(shape);
  Gpu shared(0, 0), also(0, 0);
  OnAll(2, [&](int64_t thread) {
    Gpu& gpu = thread == 0 ? shared : also;
    for (int64_t run = 1; run <= 100; ++run) {
      EXPECT_EQ(copies.Run(gpu, 0, 2 * run + thread).message, std::string());
      EXPECT_EQ(planned.Run(gpu, 0, 2 * run + thread).message, std::string());
    }
    Synchronize(gpu.stream());
  });
  EXPECT_EQ(copies.num_wrong() + planned.num_wrong(), 0);
}

// XLA can create several devices of one GPU: CUDA then has one number for them.
void LogicalDevicesShareAGpu() {
  LayerShape shape;
  shape.ranks = 2;
  shape.timeout_s = 5;
  CopyLayer copies(shape, true);
  PlannedLayer planned(shape);
  std::vector<std::unique_ptr<Gpu>> gpus;
  for (int32_t device = 0; device < 2; ++device) gpus.push_back(std::make_unique<Gpu>(device, 0));
  for (int64_t run = 1; run <= 5; ++run) {
    ExpectGoodRun(copies, gpus, run);
    ExpectGoodRun(planned, gpus, run);
  }
}

// Empty weights have no address.
void WeightsMayHaveNoBytes() {
  for (const std::vector<int64_t>& widths : std::vector<std::vector<int64_t>>{{0, 0}, {0, 24}, {96, 0}}) {
    LayerShape shape;
    shape.widths = widths;
    shape.timeout_s = 5;
    CopyLayer copies(shape, false);
    PlannedLayer planned(shape);
    const auto gpus = Gpus(4);
    for (int64_t run = 1; run <= 3; ++run) {
      ExpectGoodRun(copies, gpus, run);
      ExpectGoodRun(planned, gpus, run);
    }
  }
}

// XLA blocks the host for every loop iteration, and the static wave is a loop. The copies must overlap it all the same.
template <typename Layer>
void CopiesOverlapAWaveThatTheHostWaitsFor(Layer& layer) {
  const auto gpus = Gpus(4);
  ExpectGoodRun(layer, gpus, 1);
  TheStandIn().copy_us = 30000;
  Between between;
  between.wave_us = 60000;
  // Use the shortest of several executions, because the machine may be busy; without overlap none takes less than 90
  // ms.
  const auto seconds = [&](bool blocks_host) {
    between.blocks_host = blocks_host;
    double shortest = 1;
    for (int64_t run = 0; run < 30 && shortest > 0.08; ++run) {
      const Clock::time_point begin = Clock::now();
      for (const Ending& ending : RunOnce(layer, gpus, 2 + run + 30 * blocks_host, between)) {
        EXPECT_EQ(ending.message, std::string());
      }
      shortest = std::min(shortest, SecondsSince(begin));
    }
    return shortest;
  };
  const double free = seconds(false), blocked = seconds(true);
  std::cerr << "wave 60 ms, copies 30 ms: " << 1e3 * free << " ms, and " << 1e3 * blocked
            << " ms where the host waits for the wave" << std::endl;
  EXPECT(free < 0.085);
  EXPECT(blocked < 0.085);
  TheStandIn().copy_us = 0;
}

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
    const moe_lb::Status bad = moe_lb::peer_cuda::CheckShareable(memory.begin + 8, 0);
    EXPECT_EQ(!bad, one.is_shared);
    const char* const why =
        one.kind == MemoryKind::kPool ? "cudaIpcGetMemHandle" : "frees memory of cudaMalloc array by";
    EXPECT(one.is_shared || Has(*bad, why));
    FreeAllocation(memory);
  }
}

// The threads of copies use the device of their call. This runs in a new process, which uses devices 4 to 7 alone.
void NoContextIsMadeOnOtherDevices() {
  std::vector<std::unique_ptr<Gpu>> gpus;
  for (int32_t device = 0; device < 4; ++device) gpus.push_back(std::make_unique<Gpu>(device, device + 4));
  CopyLayer copies(LayerShape(), true);
  PlannedLayer planned{LayerShape()};
  RowsLayer rows(LayerShape(), true);
  HostPlan plan{LayerShape()};
  ExpectGoodRun(copies, gpus, 1);
  ExpectGoodRun(planned, gpus, 2);
  ExpectGoodRun(rows, gpus, 3);
  EXPECT_EQ(plan.Run(*gpus[0], 4).message, std::string());
  Synchronize(gpus[0]->stream());
  EXPECT(Contexts() == (std::set<int>{4, 5, 6, 7}));
}

// A kernel fails. Its error shows at later calls, of all threads; no device waits for another. This runs in a new
// process, which cannot use CUDA afterwards.
void AFailedKernelEndsEverything() {
  const auto gpus = Gpus(4);
  CopyLayer copies(LayerShape(), true);
  PlannedLayer planned{LayerShape()};
  RowsLayer rows(LayerShape(), true);
  auto plan = std::make_unique<HostPlan>(LayerShape());
  ExpectGoodRun(copies, gpus, 1);
  ExpectGoodRun(planned, gpus, 2);
  ExpectGoodRun(rows, gpus, 3);
  EXPECT_EQ(plan->Run(*gpus[0], 4).message, std::string());
  Synchronize(gpus[0]->stream());
  const Clock::time_point begin = Clock::now();
  const auto expect_failure = [](const Ending& ending) {
    EXPECT_EQ(ending.code, XLA_FFI_Error_Code_INTERNAL);
    EXPECT(Has(ending.message, "cudaErrorIllegalAddress"));
  };
  Between between;
  between.corrupts = true;
  // The first join may precede the error.
  for (const Ending& ending : RunOnce(copies, gpus, 5, between)) {
    if (!ending.ok) expect_failure(ending);
  }
  for (const Ending& ending : RunOnce(copies, gpus, 6)) expect_failure(ending);
  for (const Ending& ending : RunOnce(planned, gpus, 7)) expect_failure(ending);
  for (const Ending& ending : RunOnce(rows, gpus, 8)) expect_failure(ending);
  expect_failure(plan->Run(*gpus[0], 9));
  plan.reset();
  EXPECT(SecondsSince(begin) < 5);
  EndWithKeptMemory();
}

// Another device's tables never come because of it.
template <typename Layer>
void AFailedKernelBeforeTheTablesEnds(Layer& layer) {
  const auto gpus = Gpus(4);
  ExpectGoodRun(layer, gpus, 1);
  Launch(gpus[2]->stream(), [] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    Corrupt(cudaErrorIllegalAddress);
  });
  const Clock::time_point begin = Clock::now();
  for (const Ending& ending : RunOnce(layer, gpus, 2)) {
    EXPECT_EQ(ending.code, XLA_FFI_Error_Code_INTERNAL);
    EXPECT(Has(ending.message, "cudaErrorIllegalAddress"));
  }
  EXPECT(SecondsSince(begin) < 5);
}

void AFailedKernelEndsWaitingCopies() {
  CopyLayer copies(LayerShape(), false);
  AFailedKernelBeforeTheTablesEnds(copies);
}

void AFailedKernelEndsWaitingPlans() {
  PlannedLayer planned{LayerShape()};
  AFailedKernelBeforeTheTablesEnds(planned);
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

// The functions of a driver are looked up at the first copy, so this runs in a new process.
void ADriverWithoutBatchesIsNamed() {
  TheStandIn().driver_version = 12040;
  EXPECT(Has(*moe_lb::DriverCalls::Get().CheckBatches(), "has no cuMemcpyBatchAsync"));
  EXPECT(!moe_lb::DriverCalls::Get().CheckBetweenProcesses());
  CopyLayer copies(LayerShape(), true);
  const auto gpus = Gpus(4);
  ExpectGoodRun(copies, gpus, 1);
}

void NoWritesAfterAnyFailure() {
  CopyLayer copies(LayerShape(), true);
  NoWritesAfterAFailure(copies);
  PlannedLayer planned{LayerShape()};
  NoWritesAfterAFailure(planned);
  RowsLayer rows(LayerShape(), true);
  NoWritesAfterAFailure(rows);
}

void AnyFailureEndsAllCopies() {
  CopyLayer copies(LayerShape(), true);
  for (const char* const function : {"cudaMemcpyAsync", "cudaEventQuery", "cudaStreamWaitEvent", "cudaMemsetAsync",
                                     "cudaEventRecord", "cuMemcpyBatchAsync", "cudaSetDevice"}) {
    // The calls of the programs and of the threads of copies, in any order, precede those that queue copies.
    const int64_t own = std::string(function) == "cudaSetDevice" ? 8 : 0;
    OneFailureEndsAll(copies, function, own + 1);
  }
}

void AnyFailureEndsAllPlannedCopies() {
  PlannedLayer planned{LayerShape()};
  for (const char* const function : {"cudaMemcpyAsync", "cudaStreamWaitEvent", "cuMemcpyBatchAsync"}) {
    OneFailureEndsAll(planned, function, 1);
  }
}

void AnyFailureEndsAllRows() {
  RowsLayer rows(LayerShape(), true);
  OneFailureEndsAll(rows, "cudaMemcpyAsync", 1);
}

void CopiesOverlapAWave() {
  CopyLayer direct(LayerShape(), false);  // relays would wait for each other
  CopiesOverlapAWaveThatTheHostWaitsFor(direct);
  PlannedLayer planned{LayerShape()};
  CopiesOverlapAWaveThatTheHostWaitsFor(planned);
  RowsLayer rows(LayerShape(), true);
  CopiesOverlapAWaveThatTheHostWaitsFor(rows);
}

const moe_lb::TestParts kParts = {
    {"peer_access", MissingPeerAccessIsNamed},
    {"shareable", MemoryFreedByArrayIsNotShared},
    {"driver", AnOldDriverIsNamed},
    {"functions", AMissingDriverFunctionIsNamed},
    {"kernels", KernelsNeedCodeOrANewDriver},
    {"no_writes", NoWritesAfterAnyFailure},
    {"other_home", AnotherHomeIsRefused},
    {"failed_copies", AnyFailureEndsAllCopies},
    {"failed_planned", AnyFailureEndsAllPlannedCopies},
    {"failed_rows", AnyFailureEndsAllRows},
    {"stuck", ADeviceThatIsStuckIsNamed<CopyLayer>},
    {"stuck_planned", ADeviceThatIsStuckIsNamed<PlannedLayer>},
    {"no_allocation", NoAllocationWhileAProgramRuns},
    {"collective", AllocationDoesNotStopACollective},
    {"freed", APlannerFreesItsMemory},
    {"streams", CallSitesShareStreams},
    {"two_threads", TwoThreadsLaunchOnOneDevice},
    {"logical", LogicalDevicesShareAGpu},
    {"no_bytes", WeightsMayHaveNoBytes},
    {"overlap", CopiesOverlapAWave},
};

// Parts that run in processes of their own.
const moe_lb::TestParts kAlone = {
    {"contexts", NoContextIsMadeOnOtherDevices},        {"old_driver", ADriverWithoutBatchesIsNamed},
    {"retired", AFailedRecordRetiresItsSlot},           {"corrupt", AFailedKernelEndsEverything},
    {"corrupt_copies", AFailedKernelEndsWaitingCopies}, {"corrupt_plans", AFailedKernelEndsWaitingPlans},
    {"refusals", TheStandInRefusesWhatCudaRefuses},
};

}  // namespace

int main(int argc, char** argv) {
  moe_lb::TestParts parts = kParts;
  for (const auto& [name, run] : kAlone) {
    const std::string command = argv[0] + (" " + name);
    const bool is_wanted = argc > 1 && argv[1] == name;
    parts.emplace_back(name, is_wanted ? run : [command] { EXPECT(std::system(command.c_str()) == 0); });
  }
  const int status = moe_lb::RunParts(argc, argv, parts);
  for (const std::string& violation : Violations()) EXPECT_EQ(violation, std::string());
  return status;
}
