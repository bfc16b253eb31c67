// Who serves how many tokens, for a given placement: experts are poured onto the ranks that hold them.
#pragma once

#include <cstdint>

#include "ffi/common/status.h"
#include "ffi/common/view.h"

namespace moe_lb {

// Splits the tokens of every expert over the ranks that hold it, so that loads become level.
//
// 1. An expert that one rank holds is served there whole; it has no choice.
// 2. The others follow, heaviest first (ties: the lower expert). Each one's tokens t are poured onto
//    the ranks that hold it: with `load` as it stands, take the largest level v with
//    sum(max(0, v - load[r])) <= t over these ranks, lift each of them to v, and give what is left,
//    one token each, to the lowest of these ranks whose load is then exactly v.
//
// So the loads of an expert's ranks differ by at most one wherever it added tokens. The order is
// fixed and nothing is moved again: max(load) need not be the least that the placement allows.
//
//   tokens: [E], at least 0; their sum must fit int32.
//   placement: [R, S], the expert in each slot, -1 for an empty one. An expert may have several
//     slots on a rank, which count as one. An expert without a slot must have no tokens.
//   quota: [E, R], tokens of each expert that each rank serves; rows sum to `tokens`.
Status Quota(View<const int32_t> tokens, MatrixView<const int32_t> placement, MatrixView<int32_t> quota);

}  // namespace moe_lb
