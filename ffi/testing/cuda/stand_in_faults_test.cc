// Failures on the stand-in: failed calls of the runtime, failed kernels, programs failing between two calls, and
// devices that wait for each other.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "ffi/common/testing.h"
#include "ffi/testing/cuda/copy_layer.h"
#include "ffi/testing/cuda/layer_runs.h"
#include "ffi/testing/cuda/layer_weights.h"
#include "ffi/testing/cuda/planned_layer.h"
#include "ffi/testing/cuda/rows_layer.h"
#include "ffi/testing/cuda/stand_in.h"

namespace {

using namespace moe_lb::testing;

// XLA reuses the buffers if a program fails between two calls. `UseMemoryAgain` detects copies still running.
template <typename Layer>
void NoWritesAfterAFailure(Layer& layer) {
  const auto gpus = Gpus(4);
  TheStandIn().copy_us = 4000;
  Between between;
  between.fails = true;
  for (int64_t run = 1; run <= 5; ++run) {
    ExpectAllOk(RunOnce(layer, gpus, run, between));
    EXPECT_EQ(layer.num_wrong(), 0);
  }
  TheStandIn().copy_us = 0;
  ExpectGoodRun(layer, gpus, 6);
}

void NoWritesAfterAnyFailure() {
  CopyLayer copies(LayerShape(), true);
  NoWritesAfterAFailure(copies);
  PlannedLayer planned{LayerShape()};
  NoWritesAfterAFailure(planned);
  RowsLayer rows(LayerShape(), true);
  NoWritesAfterAFailure(rows);
}

// XLA may rematerialize weights: the copies have then not waited for them.
void AnotherHomeIsRefused() {
  const auto gpus = Gpus(4);
  PlannedLayer layer{LayerShape()};
  Between between;
  between.other_home = true;
  ExpectAllFail(RunOnce(layer, gpus, 1, between), XLA_FFI_Error_Code_INVALID_ARGUMENT,
                "home is not the buffers that post was given");
  ExpectGoodRun(layer, gpus, 2);
}

// The planner would write behind the end of its results.
void APlanOfAnotherSizeIsRefused() {
  const auto gpus = Gpus(4);
  const LayerShape shape;
  const int64_t size = shape.ranks * (shape.home + shape.slots + shape.experts());
  for (const int64_t more : {-1, 1}) {
    PlannedLayer layer(shape, PlannedLayer::Planner::kGreedy, more);
    const std::string got = "got " + std::to_string(size + more) + " numbers of the plan";
    ExpectAllFail(RunOnce(layer, gpus, 1), XLA_FFI_Error_Code_INVALID_ARGUMENT,
                  got + "; expected " + std::to_string(size));
  }
}

// A refusal names the attribute of the call site.
void RefusedAttributesAreNamed() {
  for (const std::string name : {"moe_lb_copy_start", "moe_lb_copy_rows"}) {
    for (const std::string attribute : {"num_lanes", "num_home", "chunk_bytes"}) {
      Attributes attributes = SiteOf(LayerShape());
      if (name == "moe_lb_copy_rows") {
        attributes["back"] = Bool(false);
        attributes["num_kinds"] = Int(1);
      }
      attributes[attribute] = Int(0);
      CallSite site(CudaXla(), CudaHandler(name), attributes);
      EXPECT(Has(site.instantiated().message, attribute + " is 0; expected at least 1"));
    }
  }
}

// A ticket is good for all slots of its start, not for the first alone.
void OtherSlotsAreRefused() {
  const auto gpus = Gpus(4);
  CopyLayer layer(LayerShape(), true);
  Between between;
  between.other_slots = true;
  ExpectAllFail(RunOnce(layer, gpus, 1, between), XLA_FFI_Error_Code_INVALID_ARGUMENT,
                "slots are not the buffers of a start in this run");
  ExpectGoodRun(layer, gpus, 2);
}

// After a failure, copies already queued for one device still read the memory of another: XLA must not reuse it before.
void HomeIsReusedAfterAllCopies() {
  const auto gpus = Gpus(4);
  CopyLayer layer(LayerShape(), false);
  Between between;
  between.reuses_home = true;
  TheStandIn().copy_us = 20000;
  for (int64_t run = 1; run <= 8; ++run) {
    FailCalls("cuMemcpyBatchAsync", 1 + run % 2, cudaErrorIllegalAddress);
    TheStandIn().failures_throw = run > 4;
    for (const Ending& ending : RunOnce(layer, gpus, run, between)) EXPECT(!ending.ok);
    EXPECT_EQ(layer.num_wrong(), 0);
  }
  FailCalls("", 0, cudaSuccess);
  TheStandIn().failures_throw = false;
  TheStandIn().copy_us = 0;
  ExpectGoodRun(layer, gpus, 9);
}

// One runtime call fails on one device: all devices fail soon, with its message, as an internal error, and the next
// execution is correct.
template <typename Layer>
void OneFailureEndsAll(Layer& layer, const std::string& function, int64_t after) {
  const auto gpus = Gpus(4);
  ExpectGoodRun(layer, gpus, 1000);
  FailCalls(function, after, cudaErrorIllegalAddress);
  const Clock::time_point begin = Clock::now();
  ExpectAllFail(RunOnce(layer, gpus, 1001), XLA_FFI_Error_Code_INTERNAL, "cudaErrorIllegalAddress");
  EXPECT(SecondsSince(begin) < 5);
  FailCalls("", 0, cudaSuccess);
  ExpectGoodRun(layer, gpus, 1002);
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

void AnyFailureEndsAllPlannedCopiesAndRows() {
  PlannedLayer planned{LayerShape()};
  for (const char* const function : {"cudaMemcpyAsync", "cudaStreamWaitEvent", "cuMemcpyBatchAsync"}) {
    OneFailureEndsAll(planned, function, 1);
  }
  RowsLayer rows(LayerShape(), true);
  OneFailureEndsAll(rows, "cudaMemcpyAsync", 1);
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

// An abandoned fetch still reads the tables, so XLA's stream waits for it before it reuses their memory.
void AnAbandonedFetchEndsFirst() {
  LayerShape shape;
  shape.timeout_s = 1;
  CopyLayer layer(shape, false);
  const auto gpus = Gpus(4);
  ExpectGoodRun(layer, gpus, 1);
  TheStandIn().fetch_us = 50000;
  std::atomic<bool> stuck{true};
  Launch(gpus[2]->stream(), [&] {
    while (stuck) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  OnAll(4, [&](int64_t device) { EXPECT(!layer.Run(*gpus[static_cast<size_t>(device)], device, 2).ok); });
  double seconds = 0;
  const Clock::time_point begin = Clock::now();
  Launch(gpus[2]->stream(), [&] { seconds = SecondsSince(begin); });
  stuck = false;
  for (const auto& gpu : gpus) Synchronize(gpu->stream());
  // Place, wanted and relay.
  EXPECT(seconds > 3 * 0.05);
  TheStandIn().fetch_us = 0;
  ExpectGoodRun(layer, gpus, 3);
}

// The copies of an earlier call take longer than the time limit of a fetch.
void AFetchDoesNotWaitForCopies() {
  LayerShape shape;
  CopyLayer slow(shape, false);
  shape.timeout_s = 1;
  CopyLayer quick(shape, false);
  const auto gpus = Gpus(4);
  TheStandIn().copy_us = 1500000;
  OnAll(4, [&](int64_t device) {
    Gpu& gpu = *gpus[static_cast<size_t>(device)];
    // The slow copies are queued in the pause.
    ExpectOk(CopyLayer::RunAll({&slow, &quick}, gpu, device, 2, 200000));
    Synchronize(gpu.stream());
  });
  TheStandIn().copy_us = 0;
  EXPECT_EQ(slow.num_wrong() + quick.num_wrong(), 0);
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
  ExpectOk(plan->Run(*gpus[0], 1));
  const int64_t pinned = PinnedBytes();
  EXPECT(pinned > before);
  FailCalls("cudaEventRecord", 0, cudaErrorIllegalAddress);
  const Ending ending = plan->Run(*gpus[0], 2);
  FailCalls("", 0, cudaSuccess);
  EXPECT_EQ(ending.code, XLA_FFI_Error_Code_INTERNAL);
  EXPECT(Has(ending.message, "cudaEventRecord"));
  // More calls than slots, in the others.
  for (int64_t run = 3; run <= 80; ++run) ExpectOk(plan->Run(*gpus[0], run));
  Synchronize(gpus[0]->stream());
  EXPECT_EQ(wrong->load(), 0);
  const Clock::time_point begin = Clock::now();
  plan.reset();
  EXPECT(SecondsSince(begin) < 5);
  EXPECT_EQ(PinnedBytes(), pinned);
  EndWithKeptMemory();
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
  ExpectOk(plan->Run(*gpus[0], 4));
  Synchronize(gpus[0]->stream());
  const Clock::time_point begin = Clock::now();
  const auto expect_failure = [](const std::vector<Ending>& endings) {
    ExpectAllFail(endings, XLA_FFI_Error_Code_INTERNAL, "cudaErrorIllegalAddress");
  };
  Between between;
  between.corrupts = true;
  // The first join may precede the error.
  for (const Ending& ending : RunOnce(copies, gpus, 5, between)) {
    if (!ending.ok) expect_failure({ending});
  }
  expect_failure(RunOnce(copies, gpus, 6));
  expect_failure(RunOnce(planned, gpus, 7));
  expect_failure(RunOnce(rows, gpus, 8));
  expect_failure({plan->Run(*gpus[0], 9)});
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
  ExpectAllFail(RunOnce(layer, gpus, 2), XLA_FFI_Error_Code_INTERNAL, "cudaErrorIllegalAddress");
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

}  // namespace

int main(int argc, char** argv) {
  const moe_lb::TestParts parts = {
      {"no_writes", NoWritesAfterAnyFailure},          {"other_home", AnotherHomeIsRefused},
      {"other_size", APlanOfAnotherSizeIsRefused},     {"other_slots", OtherSlotsAreRefused},
      {"attributes", RefusedAttributesAreNamed},       {"reused_home", HomeIsReusedAfterAllCopies},
      {"failed_copies", AnyFailureEndsAllCopies},      {"failed_planned", AnyFailureEndsAllPlannedCopiesAndRows},
      {"stuck", ADeviceThatIsStuckIsNamed<CopyLayer>}, {"stuck_planned", ADeviceThatIsStuckIsNamed<PlannedLayer>},
      {"abandoned", AnAbandonedFetchEndsFirst},        {"fetch", AFetchDoesNotWaitForCopies},
  };
  const moe_lb::TestParts alone = {
      {"retired", AFailedRecordRetiresItsSlot},
      {"corrupt", AFailedKernelEndsEverything},
      {"corrupt_copies", AFailedKernelEndsWaitingCopies},
      {"corrupt_plans", AFailedKernelEndsWaitingPlans},
  };
  return RunPartsAlone(argc, argv, parts, alone);
}
