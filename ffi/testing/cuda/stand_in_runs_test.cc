// Every CUDA handler on the stand-in: values, many devices, threads in any order, concurrent programs, and constant
// resource use.
#include <atomic>
#include <cstdint>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "ffi/common/testing.h"
#include "ffi/planning/handlers.h"
#include "ffi/testing/cuda/copy_layer.h"
#include "ffi/testing/cuda/layer_runs.h"
#include "ffi/testing/cuda/layer_weights.h"
#include "ffi/testing/cuda/planned_layer.h"
#include "ffi/testing/cuda/rows_layer.h"
#include "ffi/testing/cuda/stand_in.h"
#include "ffi/testing/valid_calls.h"

namespace {

using namespace moe_lb::testing;

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__) || defined(MOE_LB_FEW_RUNS)
constexpr int64_t kRuns = 40;
constexpr int64_t kManyRuns = 100;
#else
constexpr int64_t kRuns = 400;
constexpr int64_t kManyRuns = 10000;
#endif

// Several runs are queued ahead of the device, as in XLA, and the devices start each in another order.
template <typename Run>
void Repeat(int64_t devices, int64_t runs, const Run& run_on) {
  const auto gpus = Gpus(devices);
  OnAll(devices, [&](int64_t device) {
    std::minstd_rand random(static_cast<unsigned>(device) + 1);
    Gpu& gpu = *gpus[static_cast<size_t>(device)];
    for (int64_t run = 1; run <= runs; ++run) {
      if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
      ExpectOk(run_on(gpu, device, run));
      if (run % 8 == 0) Synchronize(gpu.stream());
    }
    Synchronize(gpu.stream());
  });
  ExpectNoViolations();
}

template <typename Layer>
void ExpectRightRuns(Layer&& layer, int64_t devices, int64_t runs = kRuns) {
  Repeat(devices, runs, [&](Gpu& gpu, int64_t rank, int64_t run) { return layer.Run(gpu, rank, run); });
  EXPECT_EQ(layer.num_wrong(), 0);
}

LayerShape Of(int64_t ranks) {
  LayerShape shape;
  shape.ranks = ranks;
  return shape;
}

// Copies with and without relays; rows there and back.
template <typename Layer>
void BothKindsAreRight() {
  for (const int64_t devices : {1, 2, 4, 8}) {
    for (const bool kind : {false, true}) ExpectRightRuns(Layer(Of(devices), kind), devices);
  }
}

void PlannedCopiesAreRight() {
  for (const auto planner : {PlannedLayer::Planner::kGreedy, PlannedLayer::Planner::kFeplb}) {
    for (const int64_t devices : {2, 4, 8}) {
      PlannedLayer layer(Of(devices), planner);
      ExpectRightRuns(layer, devices);
      EXPECT(layer.num_replicas() > 0);
    }
  }
}

void HostPlansAreRight() {
  LayerShape shape;
  HostPlan plan(shape);
  Repeat(4, kRuns, [&](Gpu& gpu, int64_t, int64_t run) { return plan.Run(gpu, run, run == 7); });
  EXPECT_EQ(plan.num_wrong(), 0);
}

// One random call of a planner, with the verifier of the fuzz. in_graph: record it and run it twice.
void Plan(Gpu& gpu, const moe_lb::HandlerRegistration& handler, Random& random, int64_t run, bool in_graph) {
  const ValidCalls& valid = AllValidCalls().at(handler.name);
  const Call call = valid.make(random);
  CallSite site(CudaXla(), handler, call.attributes);
  EXPECT_EQ(site.instantiated().message, std::string());
  Program program(gpu, run);
  const auto arrays = [&program](const std::vector<Array>& given) {
    DeviceArrays made;
    for (const Array& array : given) {
      made.push_back(program.New(array.dtype, array.dims));
      if (!array.bytes.empty()) std::memcpy(made.back().data, array.bytes.data(), array.bytes.size());
    }
    return made;
  };
  const DeviceArrays results = arrays(call.devices[0].rets);
  Invocation& invocation = program.Add(site, arrays(call.devices[0].args), results);
  const auto verify = [&] {
    Synchronize(gpu.stream());
    ExpectOk(program.ending());
    std::vector<Array> rets = call.devices[0].rets;
    for (size_t i = 0; i < rets.size(); ++i) {
      if (!rets[i].bytes.empty()) std::memcpy(rets[i].bytes.data(), results[i].data, rets[i].bytes.size());
    }
    // Status 0 is success.
    EXPECT_EQ(rets.back().bytes[0], 0);
    if (valid.verify) EXPECT_EQ(valid.verify(call.attributes, call.devices[0], rets), std::string());
  };
  if (!in_graph) {
    program.Execute(invocation);
    return verify();
  }
  Capture capture(gpu.stream());
  program.Execute(invocation);
  EXPECT_EQ(capture.End(), cudaSuccess);
  for (int replay = 0; replay < 2; ++replay) {
    for (const DeviceArray& result : results) {
      if (result.data != nullptr) std::memset(result.data, 0xEE, result.size_bytes());
    }
    capture.Replay();
    verify();
  }
}

// Every planner, on the host and in a kernel.
void EveryPlannerPlans() {
  Gpu gpu(0, 0);
  Random random(1);
  std::vector<moe_lb::HandlerRegistration> handlers = moe_lb::PlanningRegistrations().handlers;
  const auto kernels = moe_lb::PlanningKernelRegistrations().handlers;
  handlers.insert(handlers.end(), kernels.begin(), kernels.end());
  for (const moe_lb::HandlerRegistration& handler : handlers) {
    for (int64_t run = 1; run <= 20; ++run) Plan(gpu, handler, random, run, false);
  }
  ExpectNoViolations();
}

// XLA records handlers with a trait into graphs. Those are the planners in kernels; a replay of another handler would
// neither wait nor plan.
void KernelsRunInGraphs() {
  Gpu gpu(0, 0);
  Random random(2);
  std::set<std::string> names;
  for (const moe_lb::HandlerRegistration& handler : moe_lb::PlanningKernelRegistrations().handlers) {
    names.insert(handler.name);
    for (int64_t run = 1; run <= 5; ++run) Plan(gpu, handler, random, run, true);
  }
  EXPECT(CudaXla().graph_handlers() == names);
  ExpectNoViolations();
}

void AnUnsupportedBatchIsCopiedOneByOne() {
  TheStandIn().batches_are_supported = false;
  ExpectRightRuns(CopyLayer(LayerShape(), true), 4, 10);
  TheStandIn().batches_are_supported = true;
}

void ALateDeviceHasNoEffect() {
  TheStandIn().longest_delay_us = 300;
  CopyLayer layer(LayerShape(), true);
  PlannedLayer planned{LayerShape()};
  Repeat(4, 20, [&](Gpu& gpu, int64_t rank, int64_t run) {
    ExpectOk(layer.Run(gpu, rank, run, {100, false, false, false}));
    return planned.Run(gpu, rank, run, {100, run % 2 == 0, false, false});
  });
  EXPECT_EQ(layer.num_wrong() + planned.num_wrong(), 0);
  TheStandIn().longest_delay_us = 0;
}

// Two programs on the same four devices, launched by separate threads.
void ProgramsRunAtOnce() {
  CopyLayer copies(LayerShape(), true);
  PlannedLayer planned{LayerShape()};
  const auto repeat = [](auto& layer, int64_t first) {
    Repeat(4, kRuns, [&](Gpu& gpu, int64_t rank, int64_t run) { return layer.Run(gpu, rank, first + run); });
  };
  std::thread other([&] { repeat(copies, 0); });
  repeat(planned, 1000000);
  other.join();
  EXPECT_EQ(copies.num_wrong() + planned.num_wrong(), 0);
}

struct Held {
  int64_t streams = NumStreams();
  int64_t events = NumEvents();
  int64_t pinned = PinnedBytes();
};

void ResourcesStayConstant() {
  CopyLayer copies(LayerShape(), true);
  PlannedLayer planned{LayerShape()};
  RowsLayer rows(LayerShape(), true);
  HostPlan plan{LayerShape()};
  const auto run_all = [&](Gpu& gpu, int64_t rank, int64_t run) {
    ExpectOk(copies.Run(gpu, rank, run));
    ExpectOk(plan.Run(gpu, run));
    ExpectOk(rows.Run(gpu, rank, run));
    return planned.Run(gpu, rank, run);
  };
  Repeat(4, 20, run_all);
  const Held before;
  Repeat(4, kManyRuns, [&](Gpu& gpu, int64_t rank, int64_t run) { return run_all(gpu, rank, 1000 + run); });
  const Held after;
  EXPECT_EQ(after.streams, before.streams);
  EXPECT_EQ(after.events, before.events);
  EXPECT_EQ(after.pinned, before.pinned);
  EXPECT_EQ(copies.num_wrong() + planned.num_wrong() + rows.num_wrong() + plan.num_wrong(), 0);
}

}  // namespace

int main(int argc, char** argv) {
  return moe_lb::RunParts(argc, argv,
                          {{"copies", BothKindsAreRight<CopyLayer>},
                           {"planned", PlannedCopiesAreRight},
                           {"rows", BothKindsAreRight<RowsLayer>},
                           {"host_plans", HostPlansAreRight},
                           {"planners", EveryPlannerPlans},
                           {"graphs", KernelsRunInGraphs},
                           {"no_batches", AnUnsupportedBatchIsCopiedOneByOne},
                           {"late_device", ALateDeviceHasNoEffect},
                           {"two_programs", ProgramsRunAtOnce},
                           {"resources", ResourcesStayConstant}});
}
