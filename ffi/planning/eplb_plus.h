// EPLB+: replicas for the experts of the highest load per copy, packed onto the lightest ranks.
#pragma once

#include <cstdint>

#include "ffi/common/status.h"
#include "ffi/common/view.h"

namespace moe_lb {

// Fills the empty slots with replicas and splits every expert's tokens evenly over its copies, in every
// domain on its own. Experts and replicas that the placement holds stay where they are.
//
// The share of an expert is its tokens over its copies (the ranks that hold it), rounded up.
// 1. Replicate: as long as there are empty slots left in the domain, the expert of the highest share,
//    of those at home in this domain, gets one copy more. Left out are experts whose share is at most 1
//    and those with as many copies as there are ranks that hold it or could.
// 2. Pack: the new copies, highest share first, go to the rank of the domain with the lowest load of
//    those that have an empty slot and do not hold the expert; the load of a rank is the sum of the
//    shares of what it holds. A copy that fits on no rank is not made. A rank's empty slots are
//    filled from the first on.
// 3. Split: a copy serves tokens / copies; the first tokens % copies of them, by rank, one more.
// Ties go to the lower expert and rank.
//
//   tokens: [E], at least 0; their sum must fit int32. Home of expert e is rank e / (E / R).
//   placement: [R, S], the expert in each slot, -1 for an empty one. Several slots of an expert on a
//     rank count as one. An expert without a slot must have no tokens.
//   domain: ranks of a domain; divides R.
//   new_placement: [R, S]; may not overlap placement.
//   quota: [E, R], tokens of each expert that each rank serves; rows sum to `tokens`.
Status EplbPlus(View<const int32_t> tokens, MatrixView<const int32_t> placement, int64_t domain,
                MatrixView<int32_t> new_placement, MatrixView<int32_t> quota);

}  // namespace moe_lb
