#include "ffi/testing/cuda/layer_weights.h"

#include <signal.h>

#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "ffi/testing/cuda/stand_in.h"

namespace moe_lb::testing {
namespace {

constexpr XLA_FFI_DataType kBf16 = XLA_FFI_DataType_BF16;

// The synthetic byte i of an expert's weights.
unsigned char ByteOf(int64_t run, int64_t expert, size_t kind, size_t i) {
  return static_cast<unsigned char>(static_cast<size_t>(run * 131 + expert * 17) + kind * 7 + i * 3 + 1);
}

int64_t WrongBytes(const LayerShape& shape, const DeviceArray& slots, int64_t run, const int32_t* wanted, size_t kind) {
  const size_t bytes = BytesOf(shape.widths[kind]);
  int64_t wrong = 0;
  for (int64_t slot = 0; slot < shape.slots; ++slot) {
    for (size_t i = 0; i < bytes; ++i) {
      const unsigned char expected = wanted[slot] < 0 ? 0 : ByteOf(run, wanted[slot], kind, i);
      wrong += Bytes(slots)[static_cast<size_t>(slot) * bytes + i] != expected;
    }
  }
  return wrong;
}

}  // namespace

Attributes SiteOf(const LayerShape& shape) {
  return {{"num_participants", Int(shape.ranks)},
          {"num_lanes", Int(1)},
          {"num_home", Int(shape.home)},
          {"chunk_bytes", Int(40)},
          {"site", Text("layer")},
          {"timeout_s", Double(shape.timeout_s)},
          {"processes", IntArray(shape.processes)}};
}

Weights WeightsIn(Program& program, const LayerShape& shape) {
  Weights weights;
  for (const int64_t width : shape.widths) {
    weights.home.push_back(program.New(kBf16, {shape.home, width}));
    weights.slots.push_back(program.New(kBf16, {shape.slots, width}));
  }
  return weights;
}

DeviceArrays Joined(std::vector<DeviceArrays> parts) {
  DeviceArrays all;
  for (const DeviceArrays& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

std::vector<int32_t> RowOf(const std::vector<int32_t>& table, int64_t rank, int64_t columns) {
  return {table.begin() + rank * columns, table.begin() + (rank + 1) * columns};
}

void WriteHome(const LayerShape& shape, const DeviceArray& home, int64_t run, int64_t rank, size_t kind) {
  const size_t bytes = BytesOf(shape.widths[kind]);
  for (int64_t expert = 0; expert < shape.home; ++expert) {
    for (size_t i = 0; i < bytes; ++i) {
      Bytes(home)[static_cast<size_t>(expert) * bytes + i] = ByteOf(run, rank * shape.home + expert, kind, i);
    }
  }
}

void Wave(Program& program, const Between& between) {
  program.Launch([us = between.wave_us] { std::this_thread::sleep_for(std::chrono::microseconds(us)); });
  if (between.corrupts) program.Launch([] { Corrupt(cudaErrorIllegalAddress); });
  if (between.blocks_host) program.BlockHost();
  if (between.dies) raise(SIGKILL);
}

void Consume(Program& program, const LayerShape& shape, const Weights& weights, int64_t run,
             std::vector<int32_t> wanted, std::atomic<int64_t>* wrong) {
  program.Launch([shape, weights, run, wanted = std::move(wanted), wrong] {
    for (size_t kind = 0; kind < shape.widths.size(); ++kind) {
      const int64_t bytes = WrongBytes(shape, weights.slots[kind], run, wanted.data(), kind);
      wrong->fetch_add(bytes, std::memory_order_relaxed);
      for (const DeviceArray& array : {weights.home[kind], weights.slots[kind]}) {
        if (array.data != nullptr) std::memset(array.data, 0xEE, array.size_bytes());
      }
    }
  });
}

void ReuseHome(Gpu& gpu, const Weights& weights, std::atomic<int64_t>* wrong) {
  const std::string other(8, '\xA5');
  Launch(gpu.stream(), [weights, other] {
    for (const DeviceArray& array : weights.home) std::memset(array.data, other[0], array.size_bytes());
  });
  // Longer than a copy.
  Launch(gpu.stream(), [] { std::this_thread::sleep_for(std::chrono::milliseconds(50)); });
  Launch(gpu.stream(), [weights, other, wrong] {
    for (const DeviceArray& array : weights.slots) {
      const std::string bytes(static_cast<const char*>(array.data), array.size_bytes());
      wrong->fetch_add(bytes.find(other) != std::string::npos, std::memory_order_relaxed);
    }
  });
  Synchronize(gpu.stream());
}

void UseMemoryAgain(Gpu& gpu, const Weights& weights, std::atomic<int64_t>* wrong) {
  Launch(gpu.stream(), [weights] {
    for (const DeviceArray& array : Joined({weights.slots, weights.home}))
      std::memset(array.data, 0x55, array.size_bytes());
  });
  Launch(gpu.stream(), [] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); });
  Launch(gpu.stream(), [weights, wrong] {
    for (const DeviceArray& array : Joined({weights.slots, weights.home})) {
      for (size_t i = 0; i < array.size_bytes(); ++i)
        wrong->fetch_add(Bytes(array)[i] != 0x55, std::memory_order_relaxed);
    }
  });
  Synchronize(gpu.stream());
}

}  // namespace moe_lb::testing
