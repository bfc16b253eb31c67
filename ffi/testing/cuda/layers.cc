#include "ffi/testing/cuda/layers.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>
#include <random>
#include <thread>
#include <utility>

#include "ffi/planning/feplb.h"
#include "ffi/planning/greedy.h"
#include "ffi/testing/cuda/stand_in.h"
#include "ffi/testing/random_calls.h"

namespace moe_lb::testing {
namespace {

constexpr XLA_FFI_DataType kS32 = XLA_FFI_DataType_S32;
constexpr XLA_FFI_DataType kBf16 = XLA_FFI_DataType_BF16;

Attributes SiteOf(const LayerShape& shape) {
  return {{"num_participants", Int(shape.ranks)},
          {"num_lanes", Int(1)},
          {"num_home", Int(shape.home)},
          {"chunk_bytes", Int(40)},
          {"site", Text("layer")},
          {"timeout_s", Double(shape.timeout_s)},
          {"processes", IntArray(shape.processes)}};
}

unsigned char ByteOf(int64_t run, int64_t expert, size_t kind, size_t i) {
  return static_cast<unsigned char>(static_cast<size_t>(run * 131 + expert * 17) + kind * 7 + i * 3 + 1);
}

// Rows at home, and those of others that a rank has room for.
constexpr int64_t kRowsAtHome = 64;
constexpr int64_t kRowsTaken = 24;
// bf16 of a row, by kind of rows.
constexpr int64_t kRowWidths[] = {20, 1};
// What the arrays hold before rows come.
constexpr unsigned char kUntouched = 0x11;

unsigned char RowByteOf(int64_t run, size_t rank, size_t kind, size_t row, size_t i) {
  return static_cast<unsigned char>(static_cast<size_t>(run) * 29 + rank * 53 + kind * 7 + row * 5 + i * 11 + 3);
}

size_t BytesOf(int64_t width) { return static_cast<size_t>(width) * 2; }

void WriteHome(const LayerShape& shape, const DeviceArray& home, int64_t run, int64_t rank, size_t kind) {
  const size_t bytes = BytesOf(shape.widths[kind]);
  for (int64_t expert = 0; expert < shape.home; ++expert) {
    for (size_t i = 0; i < bytes; ++i) {
      Bytes(home)[static_cast<size_t>(expert) * bytes + i] = ByteOf(run, rank * shape.home + expert, kind, i);
    }
  }
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

// Weights of one device in one execution.
struct Weights {
  DeviceArrays home;
  DeviceArrays slots;
};

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

void Wave(Program& program, const Between& between) {
  program.Launch([us = between.wave_us] { std::this_thread::sleep_for(std::chrono::microseconds(us)); });
  if (between.blocks_host) program.BlockHost();
}

// Compares the slots, and then uses all memory for something else, as XLA does.
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

// The rank's row of a table [ranks, columns].
std::vector<int32_t> RowOf(const std::vector<int32_t>& table, int64_t rank, int64_t columns) {
  return {table.begin() + rank * columns, table.begin() + (rank + 1) * columns};
}

// What the program's next user of the memory does after a failure: nothing of the old program may write it any more.
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

}  // namespace

CopyTables TablesOf(const LayerShape& shape, int64_t run, bool relays) {
  std::minstd_rand random(static_cast<unsigned>(run) + 1);
  const auto size = static_cast<size_t>(shape.ranks * shape.slots);
  CopyTables tables = {std::vector<int32_t>(size, -1), std::vector<int32_t>(size, -1)};
  for (int64_t rank = 0; rank < shape.ranks; ++rank) {
    for (int64_t slot = 0; slot < shape.slots; ++slot) {
      const auto at = static_cast<size_t>(rank * shape.slots + slot);
      if (relays && slot == 0) {
        tables.wanted[at] = static_cast<int32_t>(run % shape.home);
        if (rank > 1) tables.relay[at] = static_cast<int32_t>(rank - 1);
      } else if (random() % 4 != 0) {
        tables.wanted[at] = static_cast<int32_t>(static_cast<int64_t>(random()) % shape.experts());
      }
    }
  }
  return tables;
}

// ---- start and join ----------------------------------------------------------------

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

CopyLayer::Copies CopyLayer::Add(Program& program, int64_t rank, int64_t run) {
  const CopyTables tables = TablesOf(shape_, run, relays_);
  const Weights weights = WeightsIn(program, shape_);
  const DeviceArray place = program.New(kS32, {2}), ticket = program.New(kS32, {2});
  const DeviceArray wanted = program.New(kS32, {shape_.ranks, shape_.slots});
  const DeviceArray relay = program.New(kS32, {shape_.ranks, shape_.slots});
  const DeviceArrays operands = Joined({{place, wanted, relay}, weights.home});
  Invocation& start = program.Add(start_, operands, Joined({{ticket}, weights.slots}));
  Invocation& join = program.Add(join_, Joined({{ticket}, weights.slots, operands}), weights.slots);
  program.Launch([=, shape = shape_] {
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
    const Copies copies = Add(program, rank, run);
    weights = copies.weights;
    program.Execute(*copies.start);
    Wave(program, between);
    if (!between.fails) Join(program, copies);
    ending = program.ending();
  }
  if (between.fails) UseMemoryAgain(gpu, weights, &wrong_);
  return ending;
}

Ending CopyLayer::RunAll(const std::vector<CopyLayer*>& layers, Gpu& gpu, int64_t rank, int64_t run) {
  Program program(gpu, run);
  std::vector<Copies> all;
  for (CopyLayer* const layer : layers) all.push_back(layer->Add(program, rank, run));
  for (const Copies& copies : all) program.Execute(*copies.start);
  for (size_t i = 0; i < layers.size(); ++i) layers[i]->Join(program, all[i]);
  return program.ending();
}

// ---- post, plan and copy, join -----------------------------------------------------

namespace {

using Planner = PlannedLayer::Planner;

const char* NameOf(Planner planner) { return planner == Planner::kGreedy ? "greedy" : "feplb"; }

Attributes OptionsOf(const LayerShape& shape, Planner planner) {
  if (planner == Planner::kGreedy) return {{"domain", Int(shape.ranks)}, {"min_tokens", Int(1)}};
  return {{"domain", Int(shape.ranks)},
          {"num_dynamic", Int(shape.home)},
          {"max_num_dyn", Int(shape.slots)},
          {"tau", Int(1)},
          {"skip", Bool(true)}};
}

Attributes PostSiteOf(const LayerShape& shape, Planner planner) {
  Attributes attributes = SiteOf(shape);
  const int64_t columns = shape.home + shape.slots;
  attributes["plan_size"] = Int(shape.ranks * columns + shape.experts() * shape.ranks);
  attributes["num_kinds"] = Int(static_cast<int64_t>(shape.widths.size()));
  attributes["planner"] = Text(NameOf(planner));
  attributes["options"] = Dictionary(OptionsOf(shape, planner));
  return attributes;
}

struct Plan {
  std::vector<int32_t> placement;  // [ranks, home + slots]
  std::vector<int32_t> quota;      // [experts, ranks]
};

// All at home, with loads that differ.
Plan StartOf(const LayerShape& shape, int64_t run) {
  std::minstd_rand random(static_cast<unsigned>(run) + 7);
  const int64_t columns = shape.home + shape.slots;
  Plan plan = {std::vector<int32_t>(static_cast<size_t>(shape.ranks * columns), -1),
               std::vector<int32_t>(static_cast<size_t>(shape.experts() * shape.ranks), 0)};
  for (int64_t expert = 0; expert < shape.experts(); ++expert) {
    const int64_t rank = expert / shape.home;
    plan.placement[static_cast<size_t>(rank * columns + expert % shape.home)] = static_cast<int32_t>(expert);
    const auto load = static_cast<int32_t>(random() % 1000 * (random() % 5 == 0 ? 9 : 1));
    plan.quota[static_cast<size_t>(expert * shape.ranks + rank)] = load;
  }
  return plan;
}

Plan PlanOf(const LayerShape& shape, const Plan& start, Planner planner = Planner::kGreedy) {
  Plan plan = start;
  const auto ranks = static_cast<size_t>(shape.ranks), experts = static_cast<size_t>(shape.experts());
  const auto columns = static_cast<size_t>(shape.home + shape.slots);
  const MatrixView<const int32_t> placement(start.placement.data(), ranks, columns);
  const MatrixView<const int32_t> quota(start.quota.data(), experts, ranks);
  const MatrixView<int32_t> new_placement(plan.placement.data(), ranks, columns);
  const MatrixView<int32_t> new_quota(plan.quota.data(), experts, ranks);
  if (planner == Planner::kGreedy) {
    static_cast<void>(Greedy(placement, quota, shape.ranks, 1, new_placement, new_quota));
  } else {
    const FeplbOptions options = {shape.ranks, shape.home, shape.slots, 1, true};
    static_cast<void>(Feplb(placement, quota, options, new_placement, new_quota));
  }
  return plan;
}

}  // namespace

PlannedLayer::PlannedLayer(LayerShape shape, Planner planner)
    : shape_(std::move(shape)),
      planner_(planner),
      post_(CudaXla(), CudaHandler("moe_lb_copy_post"), PostSiteOf(shape_, planner)),
      plan_(CudaXla(), CudaHandler(std::string("moe_lb_plan_") + NameOf(planner) + "_and_copy"),
            OptionsOf(shape_, planner)),
      join_(CudaXla(), CudaHandler("moe_lb_copy_join"), {}) {}

Ending PlannedLayer::Run(Gpu& gpu, int64_t rank, int64_t run, const Between& between) {
  const Plan start = StartOf(shape_, run), expected = PlanOf(shape_, start, planner_);
  const int64_t columns = shape_.home + shape_.slots;
  Weights weights;
  Ending ending;
  {
    Program program(gpu, run);
    weights = WeightsIn(program, shape_);
    const Weights again = WeightsIn(program, shape_);
    const DeviceArray place = program.New(kS32, {2}), x = program.New(kS32, {16});
    const DeviceArray posted = program.New(kS32, {2}), ticket = program.New(kS32, {2});
    const DeviceArray placement = program.New(kS32, {shape_.ranks, columns});
    const DeviceArray quota = program.New(kS32, {shape_.experts(), shape_.ranks});
    const DeviceArray new_placement = program.New(kS32, placement.dims), new_quota = program.New(kS32, quota.dims);
    const DeviceArrays& home = between.other_home ? again.home : weights.home;
    Invocation& post = program.Add(post_, Joined({{place, placement, quota}, weights.home, {x}}),
                                   Joined({{posted}, weights.slots, {x}}));
    Invocation& plan = program.Add(plan_, Joined({{placement, quota, posted}, home, weights.slots, {x}}),
                                   Joined({{new_placement, new_quota, ticket}, weights.slots, {x}}));
    Invocation& join = program.Add(join_, Joined({{ticket}, weights.slots, home, {x}}), weights.slots);
    program.Launch([=, shape = shape_] {
      Int32s(place)[0] = static_cast<int32_t>(rank);
      Int32s(place)[1] = 0;
      std::copy(start.placement.begin(), start.placement.end(), Int32s(placement));
      std::copy(start.quota.begin(), start.quota.end(), Int32s(quota));
      for (int32_t i = 0; i < 16; ++i) Int32s(x)[i] = static_cast<int32_t>(run) + i;
      for (size_t kind = 0; kind < shape.widths.size(); ++kind) {
        WriteHome(shape, weights.home[kind], run, rank, kind);
        WriteHome(shape, again.home[kind], run, rank, kind);
      }
    });
    program.Execute(post);
    Wave(program, between);
    if (!between.fails) {
      program.Execute(plan);
      program.Execute(join);
      program.Launch([=, wrong = &wrong_] {
        const auto differs = [wrong](const std::vector<int32_t>& values, const DeviceArray& array) {
          wrong->fetch_add(!std::equal(values.begin(), values.end(), Int32s(array)), std::memory_order_relaxed);
        };
        differs(expected.placement, new_placement);
        differs(expected.quota, new_quota);
        for (int32_t i = 0; i < 16; ++i) {
          wrong->fetch_add(Int32s(x)[i] != static_cast<int32_t>(run) + i, std::memory_order_relaxed);
        }
        for (const DeviceArray& array : {placement, quota, new_placement, new_quota, x}) {
          std::memset(array.data, 0xEE, array.size_bytes());
        }
      });
      const std::vector<int32_t> row = RowOf(expected.placement, rank, columns);
      const std::vector<int32_t> wanted(row.begin() + shape_.home, row.end());
      replicas_ += std::count_if(wanted.begin(), wanted.end(), [](int32_t expert) { return expert >= 0; });
      Consume(program, shape_, weights, run, wanted, &wrong_);
    }
    ending = program.ending();
  }
  if (between.fails) UseMemoryAgain(gpu, weights, &wrong_);
  return ending;
}

// ---- rows --------------------------------------------------------------------------

namespace {

// By rank and slot, as `copy_rows` takes them.
struct RowTables {
  std::vector<int32_t> home;
  std::vector<int32_t> first;
  std::vector<int32_t> size;
};

// Rows of a rank go to one taker at most, so that they can come back.
RowTables RowTablesOf(const LayerShape& shape, int64_t run) {
  std::minstd_rand random(static_cast<unsigned>(run) + 31);
  const auto size = static_cast<size_t>(shape.ranks * shape.slots);
  RowTables tables = {std::vector<int32_t>(size, -1), std::vector<int32_t>(size, 0), std::vector<int32_t>(size, 0)};
  std::vector<int64_t> next(static_cast<size_t>(shape.ranks), 0);
  for (int64_t rank = 0; rank < shape.ranks; ++rank) {
    int64_t left = kRowsTaken;
    for (int64_t slot = 0; slot < shape.slots; ++slot) {
      if (random() % 5 == 0) continue;
      const auto at = static_cast<size_t>(rank * shape.slots + slot);
      const auto home = static_cast<int64_t>(random()) % shape.ranks;
      int64_t& begin = next[static_cast<size_t>(home)];
      const int64_t rows = std::min({static_cast<int64_t>(random() % 15), left, kRowsAtHome - begin});
      tables.home[at] = static_cast<int32_t>(home);
      tables.first[at] = static_cast<int32_t>(begin);
      tables.size[at] = static_cast<int32_t>(rows);
      left -= rows;
      // Some rows nobody takes.
      begin = std::min(kRowsAtHome, begin + rows + static_cast<int64_t>(random() % 3));
    }
  }
  return tables;
}

// Where each row of a rank's arrays comes from, as pairs of a rank and a row there; nothing where none comes.
std::vector<std::pair<int64_t, int64_t>> OriginsOf(const LayerShape& shape, const RowTables& tables, int64_t rank,
                                                   bool back) {
  std::vector<std::pair<int64_t, int64_t>> origins(static_cast<size_t>(back ? kRowsAtHome : kRowsTaken), {-1, 0});
  for (int64_t taker = 0; taker < shape.ranks; ++taker) {
    int64_t landing = 0;
    for (int64_t slot = 0; slot < shape.slots; ++slot) {
      const auto at = static_cast<size_t>(taker * shape.slots + slot);
      for (int64_t row = tables.first[at]; row < tables.first[at] + tables.size[at]; ++row, ++landing) {
        if (back && tables.home[at] == rank) origins[static_cast<size_t>(row)] = {taker, landing};
        if (!back && taker == rank) origins[static_cast<size_t>(landing)] = {tables.home[at], row};
      }
    }
  }
  return origins;
}

int64_t WrongRows(const std::vector<std::pair<int64_t, int64_t>>& origins, const DeviceArray& rows, int64_t run,
                  size_t kind) {
  const size_t bytes = BytesOf(kRowWidths[kind]);
  int64_t wrong = 0;
  for (size_t row = 0; row < origins.size(); ++row) {
    for (size_t i = 0; i < bytes; ++i) {
      const auto [rank, from] = origins[row];
      const unsigned char expected =
          rank < 0 ? kUntouched : RowByteOf(run, static_cast<size_t>(rank), kind, static_cast<size_t>(from), i);
      wrong += Bytes(rows)[row * bytes + i] != expected;
    }
  }
  return wrong;
}

Attributes RowsSiteOf(LayerShape shape, bool back) {
  shape.home = 1;
  Attributes attributes = SiteOf(shape);
  attributes["back"] = Bool(back);
  attributes["num_kinds"] = Int(static_cast<int64_t>(std::size(kRowWidths)));
  return attributes;
}

}  // namespace

RowsLayer::RowsLayer(LayerShape shape, bool back)
    : shape_(std::move(shape)),
      back_(back),
      rows_(CudaXla(), CudaHandler("moe_lb_copy_rows"), RowsSiteOf(shape_, back)),
      join_(CudaXla(), CudaHandler("moe_lb_copy_join"), {}) {}

Ending RowsLayer::Run(Gpu& gpu, int64_t rank, int64_t run, const Between& between) {
  const RowTables tables = RowTablesOf(shape_, run);
  const auto origins = OriginsOf(shape_, tables, rank, back_);
  Weights arrays;  // what is read and what is written
  Ending ending;
  {
    Program program(gpu, run);
    for (const int64_t width : kRowWidths) {
      arrays.home.push_back(program.New(kBf16, {back_ ? kRowsTaken : kRowsAtHome, width}));
      arrays.slots.push_back(program.New(kBf16, {back_ ? kRowsAtHome : kRowsTaken, width}));
    }
    const DeviceArray place = program.New(kS32, {2}), ticket = program.New(kS32, {2}), x = program.New(kS32, {4});
    const DeviceArray home = program.New(kS32, {shape_.ranks, shape_.slots});
    const DeviceArray first = program.New(kS32, home.dims), size = program.New(kS32, home.dims);
    const DeviceArrays operands = Joined({{place, home, first, size}, arrays.home});
    Invocation& start = program.Add(rows_, Joined({operands, back_ ? arrays.slots : DeviceArrays(), {x}}),
                                    Joined({{ticket}, arrays.slots, {x}}));
    Invocation& join = program.Add(join_, Joined({{ticket}, arrays.slots, operands}), arrays.slots);
    program.Launch([=] {
      Int32s(place)[0] = static_cast<int32_t>(rank);
      Int32s(place)[1] = 0;
      std::copy(tables.home.begin(), tables.home.end(), Int32s(home));
      std::copy(tables.first.begin(), tables.first.end(), Int32s(first));
      std::copy(tables.size.begin(), tables.size.end(), Int32s(size));
      for (size_t kind = 0; kind < arrays.home.size(); ++kind) {
        const size_t bytes = BytesOf(kRowWidths[kind]);
        for (size_t i = 0; i < arrays.home[kind].size_bytes(); ++i) {
          Bytes(arrays.home[kind])[i] = RowByteOf(run, static_cast<size_t>(rank), kind, i / bytes, i % bytes);
        }
        std::memset(arrays.slots[kind].data, kUntouched, arrays.slots[kind].size_bytes());
      }
    });
    program.Execute(start);
    Wave(program, between);
    if (!between.fails) {
      program.Execute(join);
      program.Launch([=, wrong = &wrong_] {
        for (size_t kind = 0; kind < arrays.slots.size(); ++kind) {
          wrong->fetch_add(WrongRows(origins, arrays.slots[kind], run, kind), std::memory_order_relaxed);
          for (const DeviceArray& array : {arrays.home[kind], arrays.slots[kind]}) {
            std::memset(array.data, 0xEE, array.size_bytes());
          }
        }
      });
    }
    ending = program.ending();
  }
  if (between.fails) UseMemoryAgain(gpu, arrays, &wrong_);
  return ending;
}

// ---- planners as host functions ----------------------------------------------------

HostPlan::HostPlan(LayerShape shape)
    : shape_(std::move(shape)),
      plan_(CudaXla(), CudaHandler("moe_lb_plan_greedy"), {{"domain", Int(shape_.ranks)}, {"min_tokens", Int(1)}}) {}

Ending HostPlan::Run(Gpu& gpu, int64_t run, bool refused) {
  Plan start = StartOf(shape_, run);
  const Plan expected = PlanOf(shape_, start);
  if (refused) start.quota[0] = -1;
  Program program(gpu, run);
  const DeviceArray placement = program.New(kS32, {shape_.ranks, shape_.home + shape_.slots});
  const DeviceArray quota = program.New(kS32, {shape_.experts(), shape_.ranks});
  const DeviceArray new_placement = program.New(kS32, placement.dims), new_quota = program.New(kS32, quota.dims);
  const DeviceArray status = program.New(kS32, {1});
  Invocation& plan = program.Add(plan_, {placement, quota}, {new_placement, new_quota, status});
  program.Launch([=] {
    std::copy(start.placement.begin(), start.placement.end(), Int32s(placement));
    std::copy(start.quota.begin(), start.quota.end(), Int32s(quota));
  });
  if (before_execute) before_execute(program);
  program.Execute(plan);
  program.Launch([=, wrong = wrong_.get()] {
    bool right = Int32s(status)[0] == (refused ? 1 : 0);
    if (!refused) {
      right = right && std::equal(expected.placement.begin(), expected.placement.end(), Int32s(new_placement)) &&
              std::equal(expected.quota.begin(), expected.quota.end(), Int32s(new_quota));
    }
    wrong->fetch_add(!right, std::memory_order_relaxed);
    for (const DeviceArray& array : {placement, quota, new_placement, new_quota, status}) {
      std::memset(array.data, 0xEE, array.size_bytes());
    }
  });
  return program.ending();
}

}  // namespace moe_lb::testing
