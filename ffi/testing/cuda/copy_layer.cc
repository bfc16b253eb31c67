#include "ffi/testing/cuda/copy_layer.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>
#include <utility>

namespace moe_lb::testing {
namespace {

constexpr XLA_FFI_DataType kS32 = XLA_FFI_DataType_S32;

// Expert and source rank of each slot, as the handlers take them.
struct CopyTables {
  std::vector<int32_t> wanted;
  std::vector<int32_t> relay;
};

// Returns the tables of a run, equal on all devices. With relays, slot 0 of all ranks is copied from rank to rank, in
// odd runs all slots. The experts are those of rank 0, or of the last rank, so that the first task of all is relayed.
CopyTables TablesOf(const LayerShape& shape, int64_t run, bool relays) {
  std::minstd_rand random(static_cast<unsigned>(run) + 1);
  const auto size = static_cast<size_t>(shape.ranks * shape.slots);
  CopyTables tables = {std::vector<int32_t>(size, -1), std::vector<int32_t>(size, -1)};
  for (int64_t rank = 0; rank < shape.ranks; ++rank) {
    for (int64_t slot = 0; slot < shape.slots; ++slot) {
      const auto at = static_cast<size_t>(rank * shape.slots + slot);
      // In odd runs each rank relays several slots, one task after the other.
      if (relays && (slot == 0 || run % 2 == 1)) {
        const bool from_last = run % 4 == 2;
        const int64_t first = from_last ? shape.experts() - shape.home : 0;
        tables.wanted[at] = static_cast<int32_t>(first + (run + slot) % shape.home);
        if (rank > (from_last ? 0 : 1)) tables.relay[at] = static_cast<int32_t>(rank - 1);
      } else if (random() % 4 != 0) {
        tables.wanted[at] = static_cast<int32_t>(static_cast<int64_t>(random()) % shape.experts());
      }
    }
  }
  return tables;
}

}  // namespace

CopyLayer::CopyLayer(LayerShape shape, bool relays)
    : shape_(std::move(shape)),
      relays_(relays),
      start_(CudaXla(), CudaHandler("moe_lb_copy_start"), SiteOf(shape_)),
      join_(CudaXla(), CudaHandler("moe_lb_copy_join"), {}) {}

struct CopyLayer::Copies {
  int64_t run;
  std::vector<int32_t> wanted;  // of this rank
  Weights weights;
  Invocation* start;
  Invocation* join;
};

CopyLayer::Copies CopyLayer::Add(Program& program, int64_t rank, int64_t run, const Between& between) {
  const CopyTables tables = TablesOf(shape_, run, relays_);
  const Weights weights = WeightsIn(program, shape_);
  const DeviceArray place = program.New(kS32, {2}), ticket = program.New(kS32, {2});
  const DeviceArray wanted = program.New(kS32, {shape_.ranks, shape_.slots});
  const DeviceArray relay = program.New(kS32, {shape_.ranks, shape_.slots});
  const DeviceArrays operands = Joined({{place, wanted, relay}, weights.home});
  Invocation& start = program.Add(start_, operands, Joined({{ticket}, weights.slots}));
  DeviceArrays joined = weights.slots;
  if (between.other_slots) joined.back() = program.New(joined.back().dtype, joined.back().dims);
  Invocation& join = program.Add(join_, Joined({{ticket}, joined, operands}), joined);
  program.Launch([=, shape = shape_, zeros = between.reuses_home] {
    for (const DeviceArray& array : weights.slots) {
      if (zeros) std::memset(array.data, 0, array.size_bytes());
    }
    Int32s(place)[0] = static_cast<int32_t>(rank);
    Int32s(place)[1] = 0;
    std::copy(tables.wanted.begin(), tables.wanted.end(), Int32s(wanted));
    std::copy(tables.relay.begin(), tables.relay.end(), Int32s(relay));
    for (size_t kind = 0; kind < shape.widths.size(); ++kind) WriteHome(shape, weights.home[kind], run, rank, kind);
  });
  return {run, RowOf(tables.wanted, rank, shape_.slots), weights, &start, &join};
}

void CopyLayer::Join(Program& program, const Copies& copies) {
  program.Execute(*copies.join);
  Consume(program, shape_, copies.weights, copies.run, copies.wanted, &wrong_);
}

Ending CopyLayer::Run(Gpu& gpu, int64_t rank, int64_t run, const Between& between) {
  Weights weights;
  Ending ending;
  {
    Program program(gpu, run);
    const Copies copies = Add(program, rank, run, between);
    weights = copies.weights;
    program.Execute(*copies.start);
    Wave(program, between);
    if (!between.fails) Join(program, copies);
    ending = program.ending();
  }
  if (between.fails) UseMemoryAgain(gpu, weights, &wrong_);
  if (between.reuses_home && !ending.ok) ReuseHome(gpu, weights, &wrong_);
  return ending;
}

Ending CopyLayer::RunAll(const std::vector<CopyLayer*>& layers, Gpu& gpu, int64_t rank, int64_t run, int64_t pause_us) {
  Program program(gpu, run);
  std::vector<Copies> all;
  for (CopyLayer* const layer : layers) all.push_back(layer->Add(program, rank, run));
  for (const Copies& copies : all) {
    program.Execute(*copies.start);
    std::this_thread::sleep_for(std::chrono::microseconds(pause_us));
  }
  for (size_t i = 0; i < layers.size(); ++i) layers[i]->Join(program, all[i]);
  return program.ending();
}

}  // namespace moe_lb::testing
