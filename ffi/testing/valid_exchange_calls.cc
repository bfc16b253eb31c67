// Valid calls of the exchange of rows.
#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "ffi/testing/valid_calls.h"

namespace moe_lb::testing {
namespace {

constexpr XLA_FFI_DataType kS32 = XLA_FFI_DataType_S32;

// Slices sent and received by one rank, with consistent sizes.
struct Slices {
  std::vector<int32_t> input_offsets;
  std::vector<int32_t> send_sizes;
  std::vector<int32_t> output_offsets;
  std::vector<int32_t> recv_sizes;
  int64_t operand_rows = 0;
  int64_t output_rows = 0;
};

// `per_pair` slices from every rank to every other; gaps between them.
std::vector<Slices> MakeSlices(Random& random, size_t ranks, size_t per_pair) {
  const size_t count = ranks * per_pair;
  const Slices empty = {std::vector<int32_t>(count),
                        std::vector<int32_t>(count),
                        std::vector<int32_t>(count),
                        std::vector<int32_t>(count),
                        0,
                        0};
  std::vector<Slices> all(ranks, empty);
  for (size_t sender = 0; sender < ranks; ++sender) {
    for (size_t receiver = 0; receiver < ranks; ++receiver) {
      for (size_t i = 0; i < per_pair; ++i) {
        Slices& from = all[sender];
        Slices& to = all[receiver];
        const size_t out = receiver * per_pair + i;
        const int64_t size = random.Chance(25) ? 0 : random.Below(5);
        // Gaps before a slice make its offset differ from the sum of the sizes before it, and leave rows that receive
        // no slice.
        from.operand_rows += random.Below(2);
        to.output_rows += random.Below(2);
        from.input_offsets[out] = static_cast<int32_t>(from.operand_rows);
        from.send_sizes[out] = static_cast<int32_t>(size);
        from.output_offsets[out] = static_cast<int32_t>(to.output_rows);
        to.recv_sizes[sender * per_pair + i] = static_cast<int32_t>(size);
        from.operand_rows += size;
        to.output_rows += size;
      }
    }
  }
  return all;
}

Call Exchange(Random& random) {
  const int64_t ranks = random.Between(1, random.Chance(80) ? 3 : 5);
  const int64_t groups = random.Chance(85) ? 1 : 2;
  const int64_t lanes = random.Chance(85) ? 1 : 2;
  const int64_t per_pair = random.Between(1, 3);
  const XLA_FFI_DataType dtype = random.Of(std::vector<XLA_FFI_DataType>{
      XLA_FFI_DataType_F32, XLA_FFI_DataType_BF16, XLA_FFI_DataType_S8, XLA_FFI_DataType_C64, kS32});
  std::vector<int64_t> row;
  for (int64_t i = random.Below(3); i > 0; --i) row.push_back(random.Chance(5) ? 400 : random.Below(6));
  const auto rows = [&](int64_t count) {
    std::vector<int64_t> dims = row;
    dims.insert(dims.begin(), count);
    return dims;
  };
  Call call;
  call.attributes["num_ranks"] = Int(ranks);
  call.attributes["num_lanes"] = Int(lanes);
  call.attributes["timeout_s"] = Double(30);
  call.attributes["site"] = Text("exchange");
  for (int64_t group = 0; group < groups; ++group) {
    const std::vector<Slices> slices = MakeSlices(random, static_cast<size_t>(ranks), static_cast<size_t>(per_pair));
    // All ranks have the shapes of the largest.
    int64_t operand_rows = 0;
    int64_t output_rows = 0;
    for (const Slices& one : slices) {
      operand_rows = std::max(operand_rows, one.operand_rows);
      output_rows = std::max(output_rows, one.output_rows);
    }
    for (int64_t device = 0; device < ranks * lanes; ++device) {
      const int64_t rank = device % ranks;
      const Slices& one = slices[static_cast<size_t>(rank)];
      const auto ints = [&](const std::vector<int32_t>& values) { return Ints({ranks * per_pair}, values); };
      const Array place = Ints({2}, {static_cast<int32_t>(rank), static_cast<int32_t>(group)});
      call.devices.push_back(
          {{Filled(random, dtype, rows(operand_rows)), Filled(random, dtype, rows(output_rows)),
            ints(one.input_offsets), ints(one.send_sizes), ints(one.output_offsets), ints(one.recv_sizes), place},
           {Result(dtype, rows(output_rows))},
           // XLA aliases the output to the result, or copies it: a handler must work with both.
           random.Chance(70) ? std::map<size_t, size_t>{{1, 0}} : std::map<size_t, size_t>{}});
    }
  }
  return call;
}

}  // namespace

std::map<std::string, ValidCalls> ValidExchangeCalls() {
  return {
      {"moe_lb_ragged_exchange", {Exchange}},
  };
}

}  // namespace moe_lb::testing
