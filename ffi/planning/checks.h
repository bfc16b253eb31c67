// Argument checks shared by planners.
#pragma once

#include <cstdint>
#include <limits>

#include "ffi/common/status.h"
#include "ffi/common/view.h"

namespace moe_lb {

// Planning is int32 arithmetic in JAX: no sum of tokens may exceed it.
constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();

// tokens [E] of each expert.
inline Status CheckTokens(View<const int32_t> tokens) {
  int64_t sum = 0;
  for (size_t expert = 0; expert < tokens.size(); ++expert) {
    if (tokens[expert] < 0) {
      return Refuse("tokens of expert ", expert, " is ", tokens[expert], "; expected at least 0");
    }
    sum += tokens[expert];
  }
  if (sum > kMaxTokens) return Refuse("tokens sum to ", sum, "; expected at most ", kMaxTokens);
  return Ok();
}

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

inline Status CheckDomain(int64_t domain, size_t num_ranks) {
  if (domain >= 1 && static_cast<int64_t>(num_ranks) % domain == 0) return Ok();
  return Refuse("domain is ", domain, "; expected a divisor of the ", num_ranks, " ranks");
}

// Numbers of tokens, and their sum. names: of the matrix, its rows and its columns. sums: the matrix, with a verb.
inline Status CheckAmounts(MatrixView<const int32_t> amounts, const char* const (&names)[3], const char* sums) {
  int64_t sum = 0;
  for (size_t row = 0; row < amounts.rows(); ++row) {
    for (size_t column = 0; column < amounts.columns(); ++column) {
      const int64_t tokens = amounts[row][column];
      if (tokens < 0) {
        return Refuse(names[0], " of ", names[1], " ", row, ", ", names[2], " ", column, " is ", tokens,
                      "; expected at least 0");
      }
      sum += tokens;
    }
  }
  if (sum > kMaxTokens) return Refuse(sums, " to ", sum, " tokens; expected at most ", kMaxTokens);
  return Ok();
}

// counts [R, E].
inline Status CheckCounts(MatrixView<const int32_t> counts) {
  return CheckAmounts(counts, {"counts", "rank", "expert"}, "counts sum");
}

// Checks the arguments of planners editing a plan: placement [R, S], quota [E, R], results of the same shapes. Home
// of expert e is rank e / (E / R); domains are blocks of `domain` ranks.
inline Status CheckPlan(MatrixView<const int32_t> placement, MatrixView<const int32_t> quota, int64_t domain,
                        MatrixView<int32_t> new_placement, MatrixView<int32_t> new_quota) {
  const size_t num_ranks = placement.rows();
  const size_t num_experts = quota.rows();
  if (Status bad = CheckPlacement(placement, num_experts)) return bad;
  if (Status bad = CheckShape("quota", quota, num_experts, num_ranks)) return bad;
  if (num_experts % num_ranks != 0 || num_experts == 0) {
    return Refuse("quota has ", num_experts, " experts; expected a positive multiple of the ", num_ranks, " ranks");
  }
  if (Status bad = CheckDomain(domain, num_ranks)) return bad;
  if (Status bad = CheckShape("new_placement", new_placement, num_ranks, placement.columns())) return bad;
  if (Status bad = CheckShape("new_quota", new_quota, num_experts, num_ranks)) return bad;
  return CheckAmounts(quota, {"quota", "expert", "rank"}, "quota sums");
}

// The first `home` slots of every rank hold its home experts, in order.
inline Status CheckHomes(MatrixView<const int32_t> placement, size_t home) {
  if (placement.columns() < home) {
    return Refuse("placement has ", placement.columns(), " slots; expected at least the ", home,
                  " home experts of a rank");
  }
  for (size_t rank = 0; rank < placement.rows(); ++rank) {
    for (size_t slot = 0; slot < home; ++slot) {
      const auto expected = static_cast<int32_t>(rank * home + slot);
      if (placement[rank][slot] == expected) continue;
      return Refuse("placement of rank ", rank, ", slot ", slot, " is ", placement[rank][slot],
                    "; expected its home expert ", expected);
    }
  }
  return Ok();
}

}  // namespace moe_lb
