// Which rows of experts travel from their homes to the ranks that serve them, beside weights. No XLA, no CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ffi/common/status.h"
#include "ffi/common/view.h"
#include "ffi/transport/peer_copies.h"

namespace moe_lb {

// What slots take, as `moved_rows` of the Python package computes it: slots of a rank take rows in their order until it
// has no room left; of an expert that several ranks take rows of, lower ranks take the first ones.
//   wanted: [R, P], expert of each slot, below R * L; -1: an empty slot.
//   quota: [E, R], the rows of each expert that each rank serves.
//   first_row: [E], where the rows of each expert start at its home.
//   first: [R, P], receives where the rows of each slot start at their home.
//   size: [R, P], receives how many they are.
// Refused: tables whose sizes do not fit, an expert out of range, a negative number, or a sum beyond int32.
Status TakeRows(MatrixView<const int32_t> wanted, MatrixView<const int32_t> quota, View<const int32_t> first_row,
                size_t room, MatrixView<int32_t> first, MatrixView<int32_t> size);

// Adds the copies of what is in the arrays at home, a task for each rank that takes any. Rows land one slot after the
// other. They are the kind after all kinds of weights, counted in rows.
//   wanted, first, size: [R, P], as above.
void AddRowTasks(MatrixView<const int32_t> wanted, MatrixView<const int32_t> first, MatrixView<const int32_t> size,
                 const PeerWeights& weights, std::vector<PeerTask>* tasks);

}  // namespace moe_lb
