// Checks that several planners share.
#pragma once

#include <cstdint>
#include <limits>

#include "ffi/common/status.h"
#include "ffi/common/view.h"

namespace moe_lb {

// Planning is int32 arithmetic in JAX: no sum of tokens may exceed it.
constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();

// placement [R, S] holds experts below num_experts, or -1.
inline Status CheckPlacement(MatrixView<const int32_t> placement, size_t num_experts) {
  if (placement.rows() < 1 || placement.columns() < 1) {
    return Refuse("placement has shape [", placement.rows(), ", ", placement.columns(),
                  "]; expected [R, S], both at least 1");
  }
  for (size_t rank = 0; rank < placement.rows(); ++rank) {
    for (size_t slot = 0; slot < placement.columns(); ++slot) {
      const int64_t expert = placement[rank][slot];
      if (expert < -1 || expert >= static_cast<int64_t>(num_experts)) {
        return Refuse("placement of rank ", rank, ", slot ", slot, " is ", expert, "; expected an expert below ",
                      num_experts, ", or -1 for an empty slot");
      }
    }
  }
  return Ok();
}

template <typename T>
Status CheckShape(const char* name, MatrixView<T> matrix, size_t rows, size_t columns) {
  if (matrix.rows() == rows && matrix.columns() == columns) return Ok();
  return Refuse(name, " has shape [", matrix.rows(), ", ", matrix.columns(), "]; expected [", rows, ", ", columns, "]");
}

}  // namespace moe_lb
