// Products of groups of rows with a matrix each.
#pragma once

#include <cstdint>

#include "ffi/common/status.h"
#include "ffi/common/view.h"
#include "ffi/gemm/kernel_api.h"
#include "ffi/gemm/parallel.h"

namespace moe_lb {

// Compute out[i] = rows[i] @ weights[g] for the rows i of each group g; 0 in rows of no group, which are not read.
//   rows: [A, K], sorted by group.
//   weights: [G, K, N], or if `transposed` [G, N, K] and out[i] = rows[i] @ weights[g]^T.
//   group_sizes: [G], rows of each group, at least 0; their sum must be at most A.
//   out: [A, N].
// T is float, double or Bf16, with sums in float for Bf16. The result does not depend on the pool.
template <typename T>
Status GroupedMatmul(MatrixView<const T> rows, View<const T> weights, bool transposed, View<const int32_t> group_sizes,
                     MatrixView<T> out, const Pool& pool, Instructions instructions);

// Add to out[g] the product rows_g^T @ others_g, with x_g the rows of group g: the gradient of `weights`, by
// blocks of rows.
//   rows: [A, K], others: [A, N], both sorted by group.
//   out: [G, K, N] as a matrix [G * K, N].
template <typename T>
Status GroupedOuter(MatrixView<const T> rows, MatrixView<const T> others, View<const int32_t> group_sizes,
                    MatrixView<SumOf<T>> out, const Pool& pool, Instructions instructions);

}  // namespace moe_lb
