// The shape and expert weights of a layer on stand-in GPUs: synthetic weights, comparison of the copies, memory reuse.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ffi/testing/cuda/gpu_program.h"
#include "ffi/testing/random_calls.h"

namespace moe_lb::testing {

struct LayerShape {
  int64_t ranks = 4;
  int64_t home = 3;                        // experts of a rank
  int64_t slots = 2;                       // for replicas
  std::vector<int64_t> widths = {96, 24};  // bf16 of an expert, by kind of weights
  double timeout_s = 30;
  std::vector<int64_t> processes;  // of the ranks; empty: all are devices of this process

  int64_t experts() const { return ranks * home; }
};

// Actions between the calls of a layer; none by default.
struct Between {
  int64_t wave_us = 0;       // duration of the GPU's computation beside the copies, in microseconds
  bool blocks_host = false;  // XLA blocks the host until the wave ends, as for a loop
  bool fails = false;        // the program fails there
  bool other_home = false;   // XLA has rematerialized the home weights at another address
  bool dies = false;         // the process is killed there
  bool corrupts = false;     // a kernel fails there
  bool other_slots = false;  // join gets another array as the last slots
  bool reuses_home = false;  // after a failure, other work overwrites the home weights at once
};

// Attributes of a call site of all ranks.
Attributes SiteOf(const LayerShape& shape);

// Weights of one device in one execution.
struct Weights {
  DeviceArrays home;
  DeviceArrays slots;
};
Weights WeightsIn(Program& program, const LayerShape& shape);

// Bytes of a row of `width` bf16.
inline size_t BytesOf(int64_t width) { return static_cast<size_t>(width) * 2; }

DeviceArrays Joined(std::vector<DeviceArrays> parts);

// Row `rank` of a table [ranks, columns].
std::vector<int32_t> RowOf(const std::vector<int32_t>& table, int64_t rank, int64_t columns);

// Writes the synthetic home weights of a rank and run.
void WriteHome(const LayerShape& shape, const DeviceArray& home, int64_t run, int64_t rank, size_t kind);

// Launches the computation between two calls on the program's stream.
void Wave(Program& program, const Between& between);

// Adds the number of wrong bytes in the slots to `wrong`, then overwrites all weights, as XLA does on memory reuse.
void Consume(Program& program, const LayerShape& shape, const Weights& weights, int64_t run,
             std::vector<int32_t> wanted, std::atomic<int64_t>* wrong);

// Overwrites the home weights of a failed program, and adds 1 to `wrong` if a copy into its slots has read them
// afterwards. Slots were zero before.
void ReuseHome(Gpu& gpu, const Weights& weights, std::atomic<int64_t>* wrong);

// Overwrites the memory of a failed program and adds bytes changed afterwards (late copies) to `wrong`.
void UseMemoryAgain(Gpu& gpu, const Weights& weights, std::atomic<int64_t>* wrong);

}  // namespace moe_lb::testing
