// FasterMoE's shadowing: hot experts on every rank of their domain.
#pragma once

#include <cstdint>

#include "ffi/common/fields.h"
#include "ffi/common/status.h"
#include "ffi/common/view.h"

namespace moe_lb {

struct FasterMoeOptions {
  int64_t domain = 0;     // ranks of a domain; divides R
  int64_t min_saved = 1;  // minimum tokens by which a copy must lower the highest load of a domain; 1 to 2^31 - 1

  static auto Fields() {
    return std::make_tuple(Named("domain", &FasterMoeOptions::domain),
                           Named("min_saved", &FasterMoeOptions::min_saved));
  }
};

// Copies experts to all ranks of their domain, which then serve their own tokens of them. Domains are planned
// separately.
//
// In each step, the candidate is the home expert with the most tokens on the rank with the highest load, among its home
// experts that can be copied. It is copied if the highest load of the domain falls by at least min_saved tokens;
// otherwise planning ends. An expert can be copied if its home serves all of its tokens, no other rank holds it, and
// every other rank of the domain has an empty slot. Its home then serves its own tokens and those from outside the
// domain. Ties go to the lower rank and expert.
//
//   placement: [R, S], the expert in each slot, -1 for an empty one. The first E / R slots of a rank
//     hold its home experts in order; the home of expert e is rank e / (E / R).
//   quota: [E, R], tokens of each expert served by each rank, at least 0; their sum must fit int32.
//   counts: [R, E], tokens of each rank for each expert, likewise.
//   new_placement, new_quota: the plan after the copies, of the same shapes; may not overlap the operands.
Status FasterMoe(MatrixView<const int32_t> placement, MatrixView<const int32_t> quota, MatrixView<const int32_t> counts,
                 const FasterMoeOptions& options, MatrixView<int32_t> new_placement, MatrixView<int32_t> new_quota);

}  // namespace moe_lb
