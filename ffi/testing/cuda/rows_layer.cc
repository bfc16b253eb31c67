#include "ffi/testing/cuda/rows_layer.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <random>
#include <utility>

namespace moe_lb::testing {
namespace {

constexpr XLA_FFI_DataType kS32 = XLA_FFI_DataType_S32;
constexpr XLA_FFI_DataType kBf16 = XLA_FFI_DataType_BF16;

// Rows at home, and capacity for rows of other ranks.
constexpr int64_t kRowsAtHome = 64;
constexpr int64_t kRowsTaken = 24;
// bf16 of a row, by kind of rows.
constexpr int64_t kRowWidths[] = {20, 1};
// Initial bytes of the receive arrays.
constexpr unsigned char kUntouched = 0x11;

unsigned char RowByteOf(int64_t run, size_t rank, size_t kind, size_t row, size_t i) {
  return static_cast<unsigned char>(static_cast<size_t>(run) * 29 + rank * 53 + kind * 7 + row * 5 + i * 11 + 3);
}

// Tables of `copy_rows`, by rank and slot.
struct RowTables {
  std::vector<int32_t> home;
  std::vector<int32_t> first;
  std::vector<int32_t> size;
};

// Each row of a rank goes to at most one taker, so that it can be copied back.
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
      // Leave some rows without a taker.
      begin = std::min(kRowsAtHome, begin + rows + static_cast<int64_t>(random() % 3));
    }
  }
  return tables;
}

// Returns the source (rank, row) of each row of a rank's arrays; rank -1 for rows without a source.
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
  Weights arrays;  // source and destination rows
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

}  // namespace moe_lb::testing
