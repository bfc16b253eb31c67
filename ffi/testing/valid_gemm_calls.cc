// Valid calls of the grouped products.
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "ffi/testing/valid_calls.h"

namespace moe_lb::testing {
namespace {

// Rows, sorted by group, of a supported dtype; sizes near those of tiles.
class Groups {
 public:
  explicit Groups(Random& random)
      : dtype_(random.Of(
            std::vector<XLA_FFI_DataType>{XLA_FFI_DataType_F32, XLA_FFI_DataType_F64, XLA_FFI_DataType_BF16})),
        groups_(random.Below(5)),
        sizes_(IntsBetween(random, {groups_}, 0, random.Chance(20) ? 40 : 4)),
        num_rows_(random.Below(10)),
        depth_(Dimension(random)),
        columns_(Dimension(random)) {
    for (size_t i = 0; i < sizes_.bytes.size(); i += sizeof(int32_t)) num_rows_ += sizes_.bytes[i];  // each below 256
  }

  Call Matmul(Random& random) const {
    const bool transposed = random.Chance(50);
    const std::vector<int64_t> weights = {groups_, transposed ? columns_ : depth_, transposed ? depth_ : columns_};
    Call call;
    call.attributes["transposed"] = Int(transposed ? 1 : 0);
    call.devices.push_back({{Filled(random, dtype_, {num_rows_, depth_}), Filled(random, dtype_, weights), sizes_},
                            {Result(dtype_, {num_rows_, columns_})},
                            {}});
    return call;
  }

  Call Outer(Random& random) const {
    const XLA_FFI_DataType sums = dtype_ == XLA_FFI_DataType_BF16 ? XLA_FFI_DataType_F32 : dtype_;
    Call call;
    call.devices.push_back({{Filled(random, dtype_, {num_rows_, depth_}), Filled(random, dtype_, {num_rows_, columns_}),
                             sizes_, Filled(random, sums, {groups_, depth_, columns_})},
                            {Result(sums, {groups_, depth_, columns_})},
                            {}});
    // XLA aliases the sums to the result, or copies them: a handler must work with both.
    if (random.Chance(70)) call.devices.back().aliases[3] = 0;
    return call;
  }

 private:
  // Sizes are small, so that most end inside a tile or a vector, where bounds matter; a few span several panels.
  static int64_t Dimension(Random& random) { return random.Chance(10) ? random.Below(90) : random.Below(20); }

  const XLA_FFI_DataType dtype_;
  const int64_t groups_;
  const Array sizes_;
  int64_t num_rows_;
  const int64_t depth_;
  const int64_t columns_;
};

Call GroupedMatmul(Random& random) { return Groups(random).Matmul(random); }

Call GroupedOuter(Random& random) { return Groups(random).Outer(random); }

}  // namespace

std::map<std::string, ValidCalls> ValidGemmCalls() {
  return {
      {"moe_lb_grouped_matmul", {GroupedMatmul}},
      {"moe_lb_grouped_outer", {GroupedOuter}},
  };
}

}  // namespace moe_lb::testing
