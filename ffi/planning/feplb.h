// FEPLB: whole experts of the busiest ranks on idle ones.
#pragma once

#include <cstdint>

#include "ffi/common/fields.h"
#include "ffi/common/status.h"
#include "ffi/common/view.h"

namespace moe_lb {

struct FeplbOptions {
  int64_t domain = 0;       // ranks of a domain; divides R
  int64_t num_dynamic = 4;  // movable home experts of a rank; at least 1
  int64_t max_num_dyn = 8;  // maximum experts taken by a rank; at least 1
  int64_t tau = 1;          // minimum tokens of a moved expert; 1 to 2^31 - 1
  bool skip = false;        // if true, a smaller expert moves if the busiest cannot

  static auto Fields() {
    return std::make_tuple(Named("domain", &FeplbOptions::domain), Named("num_dynamic", &FeplbOptions::num_dynamic),
                           Named("max_num_dyn", &FeplbOptions::max_num_dyn), Named("tau", &FeplbOptions::tau),
                           Named("skip", &FeplbOptions::skip));
  }
};

// Moves all tokens of an expert served by its home to another rank. Domains are planned separately.
//
// The dynamic experts of a rank are the num_dynamic home experts with the most tokens served there. In each move, the
// donor is the rank with the highest load, and the expert is the busiest of its dynamic experts not moved yet. The
// taker is the rank with the lowest load, among ranks with an empty slot, with fewer than max_num_dyn taken experts and
// without a copy of the expert. The move is made if the donor serves at least tau tokens of the expert, and the taker
// ends below the donor's current load. Otherwise, with `skip`, the donor's next dynamic expert is tried. Planning ends
// if no move is made. Ties go to the lower rank and expert.
//
//   placement: [R, S], the expert in each slot, -1 for an empty one. The first E / R slots of a rank
//     hold its home experts in order; the home of expert e is rank e / (E / R).
//   quota: [E, R], tokens of each expert served by each rank, at least 0; their sum must fit int32.
//   new_placement, new_quota: the plan after the moves, of the same shapes; may not overlap the
//     operands. The home slot of a moved expert stays and serves no tokens.
Status Feplb(MatrixView<const int32_t> placement, MatrixView<const int32_t> quota, const FeplbOptions& options,
             MatrixView<int32_t> new_placement, MatrixView<int32_t> new_quota);

}  // namespace moe_lb
