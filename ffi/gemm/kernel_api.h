// One block of a matrix product on one thread, for the instruction set of this processor.
#pragma once

#include <cstdint>
#include <type_traits>

namespace moe_lb {

struct Bf16 {
  uint16_t bits;
};

// Accumulator type of T.
template <typename T>
using SumOf = std::conditional_t<std::is_same_v<T, Bf16>, float, T>;

// Each level includes those before it. kAvx512Bf16 is kAvx512 with a product of bfloat16 pairs.
enum class Instructions { kBase, kAvx2, kAvx512, kAvx512Bf16 };

// Returns the level of this processor.
Instructions BestInstructions();

// Rows of a block. The broadcast operand of a block, [256, 2 KB], stays in the second-level cache.
constexpr int64_t kMaxBlockRows = 256;

// Bounds of columns in tasks are multiples of this, so that all panels but the last are whole: it is a multiple of
// every kernel's panel width.
constexpr int64_t kColumnStep = 48;

// Computes out[i, j] = sum over r of a[i, r] * b[r, j], for j from first_column to before last_column; 0 if depth is 0.
// With `adds`, available if Out is the accumulator type, the sum is added to `out`.
template <typename T, typename Out>
struct Block {
  const T* a;  // a[i, r] is at i * a_row_stride + r * a_depth_stride; one of the strides is 1
  int64_t a_row_stride;
  int64_t a_depth_stride;
  const T* b;  // b[r, j] is at r * b_stride + j, or if transposed at j * b_stride + r
  int64_t b_stride;
  bool b_transposed;
  int64_t rows;  // at most kMaxBlockRows
  int64_t depth;
  int64_t first_column;
  int64_t last_column;
  Out* out;  // out[i, j] is at i * out_stride + j
  int64_t out_stride;
  bool adds = false;
};

// Returns false without any output if memory for packed operands cannot be allocated. T and Out are float and float,
// double and double, Bf16 and Bf16, or Bf16 and float. Every element of `out` is summed in the same order, for every
// block.
template <typename T, typename Out>
[[nodiscard]] bool Multiply(Instructions instructions, const Block<T, Out>& block);

}  // namespace moe_lb
