// Rows for other domains in chunks, longest processing time first, over the rails of a domain (RailS).
#pragma once

#include <cstdint>

#include "ffi/common/status.h"
#include "ffi/common/view.h"

namespace moe_lb {

// Of a rail, the time per row; they are compared as products with loads, in 62 bits in JAX too.
constexpr int32_t kMaxTicks = 32767;
constexpr int64_t kMaxChunks = 4096;

// Puts the rows from rank to rank on rails, for every sending domain and every receiving domain on their own: what a
// domain sends is planned from its own rows alone.
//
// Of all rows from domain d to domain f:
// 1. A chunk is max(1, rows / (rails * chunks)), rounded down. The rows of each pair of ranks are cut into chunks and
//    one rest.
// 2. The chunks, by sender, then receiver, and then the rests, the largest first, go one after the other to the rail
//    that is done with it first: of the smallest (load + rows of it) * ticks. Ties go to the first rail from
//    (d + f) % rails on, cyclically, so that neither what a domain sends nor what one receives gathers on the same
//    rail; of rests, to the lower pair.
// Rows inside a domain travel along no rail; they are put on that of the receiver, offset * rails / members.
//
//   rows: [R, R], from rank to rank, at least 0; their sum must fit int32.
//   ticks: [N], of each rail, at most kMaxTicks; 0 for a dead one. N divides the members.
//   domain: members of a domain; divides R. A domain is a node here, the ranks that share network rails, which need not
//     be those among which a plan moves expert weights.
//   chunks: of each pair of domains on each rail, at least, where there are so many rows; at most kMaxChunks.
//   rails: [R, R * N], rows from rank to rank on each rail.
Status Spray(MatrixView<const int32_t> rows, View<const int32_t> ticks, int64_t domain, int64_t chunks,
             MatrixView<int32_t> rails);

}  // namespace moe_lb
