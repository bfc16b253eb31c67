// FEPLB: whole experts of the busiest ranks on idle ones.
#pragma once

#include <cstdint>

#include "ffi/common/status.h"
#include "ffi/common/view.h"

namespace moe_lb {

struct FeplbOptions {
  int64_t domain;       // ranks of a domain; divides R
  int64_t num_dynamic;  // home experts of a rank that may move; at least 1
  int64_t max_num_dyn;  // experts that a rank takes; at least 1
  int64_t tau;          // tokens of an expert that moves; 1 to 2^31 - 1
  bool skip;            // if true, a smaller expert moves if the busiest cannot
};

// Moves the tokens that a home serves of an expert, all of them, to another rank. Domains are planned separately.
//
// The dynamic experts of a rank are the num_dynamic of its home experts that it serves most of. Until
// no move is made: the donor is the rank with the highest load, the expert the busiest of its dynamic
// experts that has not moved yet, and the taker the rank with the lowest load among those that have an
// empty slot, have taken fewer than max_num_dyn, and hold no copy of the expert. The move is made if
// the donor serves at least tau tokens of the expert, and the taker ends below what the donor has now.
// Else, with `skip`, the donor's next dynamic expert is tried. Ties go to the lower rank and expert.
//
//   placement: [R, S], the expert in each slot, -1 for an empty one. The first E / R slots of a rank
//     hold its home experts in order; the home of expert e is rank e / (E / R).
//   quota: [E, R], tokens of each expert that each rank serves, at least 0; their sum must fit int32.
//   new_placement, new_quota: the plan after the moves, of the same shapes; may not overlap the
//     operands. A mover's home slot stays, and serves none of it.
Status Feplb(MatrixView<const int32_t> placement, MatrixView<const int32_t> quota, const FeplbOptions& options,
             MatrixView<int32_t> new_placement, MatrixView<int32_t> new_quota);

}  // namespace moe_lb
