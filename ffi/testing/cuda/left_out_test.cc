// Every wait, record and query in the CUDA handlers is necessary: without it ThreadSanitizer reports a data race,
// values are wrong, or a wait hangs.
//
// A separate process runs each case: it ignores one place of such a call, runs all handlers and must fail. The list of
// places comes from the stand-in after a run of everything, so every new call is tested. Calls that matter only after
// an error are in `stand_in_faults_test`.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "ffi/common/testing.h"
#include "ffi/testing/cuda/copy_layer.h"
#include "ffi/testing/cuda/layer_weights.h"
#include "ffi/testing/cuda/planned_layer.h"
#include "ffi/testing/cuda/rows_layer.h"
#include "ffi/testing/cuda/stand_in.h"

// The first report ends a process.
extern const char __executable_start;
extern "C" const char* __tsan_default_options() { return "halt_on_error=1:exitcode=66"; }

namespace {

using namespace moe_lb::testing;

constexpr int64_t kDevices = 3;

LayerShape Shape() {
  LayerShape shape;
  shape.ranks = kDevices;
  shape.timeout_s = 2;
  return shape;
}

template <typename Run>
void Repeat(int64_t runs, const Run& run_on) {
  const auto gpus = Gpus(kDevices);
  for (int64_t run = 1; run <= runs; ++run) {
    OnAll(kDevices, [&](int64_t device) { run_on(*gpus[static_cast<size_t>(device)], device, run); });
    // Some executions follow each other at once, and some find the device idle.
    if (run % 3 == 0) {
      for (const auto& gpu : gpus) Synchronize(gpu->stream());
    }
  }
}

void Block(const Gpu& gpu, int64_t ms) {
  Launch(gpu.stream(), [ms] { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); });
}

// Queues more calls than planners have slots behind slow work; their executable is destroyed before they complete.
void QueueManyPlans() {
  Gpu gpu(0, 0);
  std::shared_ptr<std::atomic<int64_t>> wrong;
  {
    LayerShape shape = Shape();
    shape.home = 5;  // a unique size, so that no other executable keeps the memory
    HostPlan plan(shape);
    wrong = plan.wrong();
    ExpectOk(plan.Run(gpu, 1));
    Block(gpu, 30);
    for (int64_t run = 2; run <= 50; ++run) ExpectOk(plan.Run(gpu, run));
  }
  Synchronize(gpu.stream());
  EXPECT_EQ(wrong->load(), 0);
}

// Runs all handlers without failures, and programs failing between two calls.
void RunAll() {
  TheStandIn().longest_delay_us = 200;
  QueueManyPlans();
  CopyLayer copies(Shape(), false), relays(Shape(), true);
  PlannedLayer planned(Shape());
  RowsLayer onward(Shape(), false), back(Shape(), true);
  HostPlan plan(Shape());
  Repeat(9, [&](Gpu& gpu, int64_t rank, int64_t run) {
    ExpectOk(copies.Run(gpu, rank, run));
    ExpectOk(plan.Run(gpu, run));
    ExpectOk(relays.Run(gpu, rank, run));
    ExpectOk(planned.Run(gpu, rank, run));
    ExpectOk(onward.Run(gpu, rank, run));
    ExpectOk(back.Run(gpu, rank, run));
  });
  PlanOnTwoStreams();
  TheStandIn().copy_us = 2000;
  Between between;
  between.fails = true;
  Repeat(3, [&](Gpu& gpu, int64_t rank, int64_t run) {
    ExpectOk(relays.Run(gpu, rank, 100 + run, between));
    ExpectOk(planned.Run(gpu, rank, 100 + run, between));
    ExpectOk(back.Run(gpu, rank, 100 + run, between));
  });
  EXPECT_EQ(copies.num_wrong() + relays.num_wrong() + planned.num_wrong() + plan.num_wrong(), 0);
  EXPECT_EQ(onward.num_wrong() + back.num_wrong(), 0);
  EXPECT(Violations().empty());
}

// A place in the code, equal in every process.
std::ptrdiff_t OffsetOf(const CallPlace& place) {
  return static_cast<const char*>(place.returns_to) - &__executable_start;
}

// Runs this program with an argument; returns its standard output and its success.
bool RunAgain(const std::string& program, const std::string& arguments, std::string* output) {
  const std::string command = "'" + program + "' " + arguments + " 2>/dev/null";
  FILE* const pipe = popen(command.c_str(), "r");
  EXPECT(pipe != nullptr);
  char part[256];
  while (std::fgets(part, sizeof part, pipe) != nullptr) *output += part;
  return pclose(pipe) == 0;
}

int ListPlaces() {
  RunAll();
  for (const CallPlace& place : OrderingCalls()) std::cout << place.function << " " << OffsetOf(place) << std::endl;
  return 0;
}

int RunWithout(const std::string& offset) {
  // A hang is a failure too.
  alarm(20);
  Ignore({"", &__executable_start + std::stoll(offset)});
  RunAll();
  return 0;
}

int TryAll(const std::string& program) {
  std::string places;
  EXPECT(RunAgain(program, "list", &places));
  std::istringstream lines(places);
  std::string function;
  std::ptrdiff_t offset = 0;
  int count = 0;
  bool all_needed = true;
  while (lines >> function >> offset) {
    // Missing order shows only in some thread schedules, so a case may need several attempts.
    bool fails = false;
    std::string ignored;
    for (int attempt = 0; attempt < 3 && !fails; ++attempt) {
      fails = !RunAgain(program, std::to_string(offset), &ignored);
    }
    // The offset for addr2line.
    std::cerr << function << " returning to 0x" << std::hex << offset << (fails ? ": needed" : ": NOT NEEDED")
              << std::endl;
    all_needed = all_needed && fails;
    ++count;
  }
  EXPECT(count >= 12);
  return all_needed ? 0 : 1;
}

}  // namespace

// Without arguments, try all places. "list": print the places. A number: run without this place.
int main(int argc, char** argv) {
  if (argc < 2) return TryAll(argv[0]);
  return std::string(argv[1]) == "list" ? ListPlaces() : RunWithout(argv[1]);
}
