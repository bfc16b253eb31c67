// Memory, streams, contexts and time that calls take: allocation while programs run, call sites and threads that share
// a device, and copies beside a wave.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <iostream>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "ffi/common/testing.h"
#include "ffi/testing/cuda/copy_layer.h"
#include "ffi/testing/cuda/layer_runs.h"
#include "ffi/testing/cuda/layer_weights.h"
#include "ffi/testing/cuda/planned_layer.h"
#include "ffi/testing/cuda/rows_layer.h"
#include "ffi/testing/cuda/stand_in.h"
#include "ffi/transport/peer_site_cuda.h"

namespace {

using namespace moe_lb::testing;

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
    ExpectOk(copies.Run(gpu, rank, 1));
    ExpectOk(plan.Run(gpu, 1));
    ExpectOk(planned.Run(gpu, rank, 1));
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
    ExpectOk(plan.Run(gpu, 1));
    Synchronize(gpu.stream());
    ++done;
  });
  watch.join();
  EXPECT_EQ(plan.num_wrong(), 0);
  TheStandIn().allocation_waits = false;
}

// Streams of one device share a ring of slots. The status of a refused call is the last word of its slot, and 0 is the
// first word of the next one.
void SlotsDoNotOverlap() {
  LayerShape shape;
  shape.ranks = 2;
  shape.home = 53;  // a size unique to this test
  HostPlan plan(shape);
  std::vector<std::unique_ptr<Gpu>> gpus;
  for (int32_t ordinal = 0; ordinal < 4; ++ordinal) gpus.push_back(std::make_unique<Gpu>(ordinal, 0));
  TheStandIn().longest_delay_us = 300;
  OnAll(4, [&](int64_t stream) {
    Gpu& gpu = *gpus[static_cast<size_t>(stream)];
    for (int64_t run = 1; run <= 60; ++run) {
      ExpectOk(plan.Run(gpu, run, (run + stream) % 2 == 0));
    }
    Synchronize(gpu.stream());
  });
  TheStandIn().longest_delay_us = 0;
  EXPECT_EQ(plan.num_wrong(), 0);
}

// Tables of a copy that fill the pinned memory of their launch resources: the stand-in records a copy beyond it.
void TablesFillTheirMemory() {
  const auto gpus = Gpus(1);
  LayerShape shape;
  shape.ranks = 1;
  shape.slots = (256 - static_cast<int64_t>(moe_lb::peer_cuda::kPlaceWords)) / 2;
  CopyLayer copies(shape, false);
  ExpectGoodRun(copies, gpus, 1);
  ExpectNoViolations();
}

// Programs that fail before their join leave no open ticket.
void FailedProgramsKeepNoTicket() {
  const auto gpus = Gpus(2);
  LayerShape shape;
  shape.ranks = 2;
  CopyLayer copies(shape, false);
  RowsLayer rows(shape, false);
  Between between;
  between.fails = true;
  for (int64_t run = 1; run <= 4; ++run) {
    ExpectAllOk(RunOnce(copies, gpus, 2 * run, between));
    ExpectAllOk(RunOnce(rows, gpus, 2 * run + 1, between));
    EXPECT_EQ(moe_lb::peer_cuda::OpenTickets().num_open(), size_t{0});
  }
}

// Programs that fail between two calls leave no open post, which would hold pinned memory.
void FailedProgramsKeepNoMemory() {
  const auto gpus = Gpus(2);
  LayerShape shape;
  shape.ranks = 2;
  shape.home = 59;  // a size unique to this test
  PlannedLayer planned(shape);
  Between between;
  between.fails = true;
  int64_t pinned = 0;
  for (int64_t run = 1; run <= 40; ++run) {
    ExpectAllOk(RunOnce(planned, gpus, run, between));
    if (run == 8) pinned = PinnedBytes();
  }
  EXPECT_EQ(PinnedBytes(), pinned);
}

// The last call site of a size frees its memory and events.
void APlannerFreesItsMemory() {
  const auto gpus = Gpus(1);
  LayerShape shape;
  shape.home = 47;  // a size unique to this test
  auto plan = std::make_unique<HostPlan>(shape);
  const int64_t pinned = PinnedBytes(), events = NumEvents();
  ExpectOk(plan->Run(*gpus[0], 1));
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
  ExpectOk(plan.Run(*gpus[0], 4));
  Synchronize(gpus[0]->stream());
  EXPECT(Contexts() == (std::set<int>{4, 5, 6, 7}));
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
      ExpectOk(copies.Run(gpu, 0, 2 * run + thread));
      ExpectOk(planned.Run(gpu, 0, 2 * run + thread));
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
      ExpectAllOk(RunOnce(layer, gpus, 2 + run + 30 * blocks_host, between));
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

void CopiesOverlapAWave() {
  CopyLayer direct(LayerShape(), false);  // relays would wait for each other
  CopiesOverlapAWaveThatTheHostWaitsFor(direct);
  PlannedLayer planned{LayerShape()};
  CopiesOverlapAWaveThatTheHostWaitsFor(planned);
  RowsLayer rows(LayerShape(), true);
  CopiesOverlapAWaveThatTheHostWaitsFor(rows);
}

}  // namespace

int main(int argc, char** argv) {
  const moe_lb::TestParts parts = {
      {"no_allocation", NoAllocationWhileAProgramRuns},
      {"collective", AllocationDoesNotStopACollective},
      {"slots", SlotsDoNotOverlap},
      {"filled", TablesFillTheirMemory},
      {"tickets", FailedProgramsKeepNoTicket},
      {"failed", FailedProgramsKeepNoMemory},
      {"freed", APlannerFreesItsMemory},
      {"streams", CallSitesShareStreams},
      {"two_threads", TwoThreadsLaunchOnOneDevice},
      {"logical", LogicalDevicesShareAGpu},
      {"no_bytes", WeightsMayHaveNoBytes},
      {"overlap", CopiesOverlapAWave},
  };
  const moe_lb::TestParts alone = {
      {"contexts", NoContextIsMadeOnOtherDevices},
  };
  return RunPartsAlone(argc, argv, parts, alone);
}
