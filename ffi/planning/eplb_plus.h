// EPLB+: replicas for the experts of the highest load per copy, packed onto the lightest ranks.
#pragma once

#include <cstdint>

#include "ffi/common/fields.h"
#include "ffi/common/status.h"
#include "ffi/common/view.h"

namespace moe_lb {

struct EplbPlusOptions {
  int64_t domain = 0;  // ranks of a domain; divides R

  static auto Fields() { return std::make_tuple(Named("domain", &EplbPlusOptions::domain)); }
};

// Fills the empty slots with replicas and splits every expert's tokens evenly over its copies, in every domain
// separately. Experts and replicas of the given placement keep their slots.
//
// The share of an expert is its tokens divided by its copies (the ranks holding it), rounded up.
// 1. Replicate: while the domain has empty slots, the expert with the highest share, among experts at home in this
//    domain, gets one more copy. Experts with a share of at most 1 are skipped, and experts with as many copies as
//    ranks that hold them or could.
// 2. Pack: the new copies, highest share first, go to the rank of the domain with the lowest load, among ranks with an
//    empty slot and without the expert. The load of a rank is the sum of the shares of its experts. A copy that fits on
//    no rank is not made. The empty slots of a rank are filled from the first on.
// 3. Split: a copy serves tokens / copies; the first tokens % copies of them, by rank, serve one more.
// Ties go to the lower expert and rank.
//
//   tokens: [E], at least 0; their sum must fit int32. Home of expert e is rank e / (E / R).
//   placement: [R, S], the expert in each slot, -1 for an empty one. Several slots of an expert on a
//     rank count as one. An expert without a slot must have no tokens.
//   new_placement: [R, S]; may not overlap placement.
//   quota: [E, R], tokens of each expert served by each rank; rows sum to `tokens`.
Status EplbPlus(View<const int32_t> tokens, MatrixView<const int32_t> placement, const EplbPlusOptions& options,
                MatrixView<int32_t> new_placement, MatrixView<int32_t> quota);

}  // namespace moe_lb
