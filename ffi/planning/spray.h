// Assigns rows for other nodes, in chunks, longest processing time first, to the rails of a node (RailS).
#pragma once

#include <cstdint>

#include "ffi/common/fields.h"
#include "ffi/common/status.h"
#include "ffi/common/view.h"

namespace moe_lb {

// Time per row of a rail; products of ticks and loads fit 62 bits, in JAX too.
constexpr int32_t kMaxTicks = 32767;
constexpr int64_t kMaxChunks = 4096;

struct SprayOptions {
  // Ranks sharing network rails; divides R. They may differ from the ranks of a domain, among which a plan moves expert
  // weights.
  int64_t ranks_per_node = 0;
  int64_t chunks = 1;  // of each pair of nodes on each rail, at least, if there are enough rows; at most kMaxChunks

  static auto Fields() {
    return std::make_tuple(Named("ranks_per_node", &SprayOptions::ranks_per_node),
                           Named("chunks", &SprayOptions::chunks));
  }
};

// Assigns the rows from rank to rank to rails, for each pair of sending and receiving node separately: the plan of a
// sending node depends on its own rows only.
//
// Of all rows from node d to node f:
// 1. A chunk is max(1, rows / (rails * chunks)), rounded down. The rows of each pair of ranks are cut into chunks and
//    one rest.
// 2. The chunks, by sender, then receiver, are assigned one after the other, then the rests, largest first, ties to the
//    lower pair. Each goes to the rail with the earliest completion, the smallest (load + rows of it) * ticks. Ties go
//    to the first rail from (d + f) % rails on, cyclically, so that neither the rows sent by a node nor those received
//    by one accumulate on the same rail.
// Rows inside a node use no rail. They are counted on the rail of the receiver, offset * rails / ranks_per_node.
//
//   rows: [R, R], from rank to rank, at least 0; their sum must fit int32.
//   ticks: [N], of each rail, at most kMaxTicks; 0 for a dead one. N divides the ranks of a node.
//   rails: [R, R * N], rows from rank to rank on each rail.
Status Spray(MatrixView<const int32_t> rows, View<const int32_t> ticks, const SprayOptions& options,
             MatrixView<int32_t> rails);

}  // namespace moe_lb
