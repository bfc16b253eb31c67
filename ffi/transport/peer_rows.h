// Which rows of experts travel from their homes to the ranks that serve them, and what became of them back. No XLA, no
// CUDA.
#pragma once

#include <cstdint>
#include <vector>

#include "ffi/common/status.h"
#include "ffi/common/view.h"
#include "ffi/transport/peer_copies.h"

namespace moe_lb {

// The copies of rows between homes and takers, a task for each rank that receives any; each kind of rows in the same
// places. At a taker the rows of its slots stand one after the other.
//   home: [R, P], the rank from which a slot takes rows; -1: it takes none.
//   first: [R, P], where these rows start at that rank.
//   size: [R, P], how many they are.
//   weights: `expert_bytes` are those of a row of each kind; its `rows` say in which direction they go.
// Refused: tables whose sizes do not fit, a rank out of range, a negative number, rows beyond the arrays.
Status PlanRowTasks(MatrixView<const int32_t> home, MatrixView<const int32_t> first, MatrixView<const int32_t> size,
                    const PeerWeights& weights, std::vector<PeerTask>* tasks);

}  // namespace moe_lb
