// Copy plan for token rows between the home ranks of experts and the ranks serving them. Depends on neither XLA nor
// CUDA.
#pragma once

#include <cstdint>
#include <vector>

#include "ffi/common/status.h"
#include "ffi/common/view.h"
#include "ffi/transport/peer_copies.h"

namespace moe_lb {

// Plan the copies of rows between homes and takers, with one task per receiving rank. All kinds of rows are copied
// alike. At a taker, the rows of its slots are contiguous, in slot order.
//   home: [R, P], source rank of each slot; -1: none.
//   first: [R, P], first row at that rank.
//   size: [R, P], number of rows.
//   weights: `expert_bytes` is the size of a row of each kind; `rows` holds the direction.
// Fails on tables of different shapes, a rank out of range, a negative number, rows beyond the arrays, or two slots
// returning rows to the same place.
Status PlanRowTasks(MatrixView<const int32_t> home, MatrixView<const int32_t> first, MatrixView<const int32_t> size,
                    const PeerWeights& weights, std::vector<PeerTask>* tasks);

}  // namespace moe_lb
