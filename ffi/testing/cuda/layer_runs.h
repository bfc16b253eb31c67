// Executions of layers on all devices of the stand-in, and tests that need a process of their own.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "ffi/common/testing.h"
#include "ffi/testing/cuda/gpu_program.h"
#include "ffi/testing/cuda/layer_weights.h"
#include "ffi/testing/cuda/stand_in.h"

namespace moe_lb::testing {

using Clock = std::chrono::steady_clock;

inline double SecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

inline void ExpectNoViolations() {
  for (const std::string& violation : Violations()) EXPECT_EQ(violation, std::string());
}

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

inline void ExpectAllOk(const std::vector<Ending>& endings) {
  for (const Ending& ending : endings) ExpectOk(ending);
}

// part: of all messages.
inline void ExpectAllFail(const std::vector<Ending>& endings, XLA_FFI_Error_Code code, const std::string& part) {
  for (const Ending& ending : endings) {
    EXPECT_EQ(ending.code, code);
    EXPECT(Has(ending.message, part));
  }
}

template <typename Layer>
void ExpectGoodRun(Layer& layer, const std::vector<std::unique_ptr<Gpu>>& gpus, int64_t run) {
  ExpectAllOk(RunOnce(layer, gpus, run));
  EXPECT_EQ(layer.num_wrong(), 0);
}

// Ends the process of a part without a check of leaks: handlers keep memory that a device may still write.
[[noreturn]] inline void EndWithKeptMemory() {
  ExpectNoViolations();
  std::_Exit(0);
}

// Runs parts as `RunParts`, those of `alone` in processes of their own.
inline int RunPartsAlone(int argc, char** argv, TestParts parts, const TestParts& alone) {
  for (const auto& [name, run] : alone) {
    const std::string command = argv[0] + (" " + name);
    const bool is_wanted = argc > 1 && argv[1] == name;
    parts.emplace_back(name, is_wanted ? run : [command] { EXPECT(std::system(command.c_str()) == 0); });
  }
  const int status = RunParts(argc, argv, parts);
  ExpectNoViolations();
  return status;
}

}  // namespace moe_lb::testing
