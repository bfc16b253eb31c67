// The exact-size exchange of rows between ranks, once all of them have met.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ffi/common/status.h"
#include "ffi/common/view.h"

namespace moe_lb {

// What one of R ranks brings: the arguments of `lax.ragged_all_to_all`. U slices, a multiple of R; slices i * U / R to
// (i + 1) * U / R go to rank i, and what a rank receives is in the order of the senders.
struct ExchangeSide {
  const std::byte* operand = nullptr;  // [operand_rows, row_bytes]
  int64_t operand_rows = 0;
  std::byte* output = nullptr;  // [output_rows, row_bytes]; rows on which nothing lands keep their value
  int64_t output_rows = 0;
  size_t row_bytes = 0;
  View<const int32_t> input_offsets{nullptr, 0};   // [U], where in the operand a slice starts, in rows
  View<const int32_t> send_sizes{nullptr, 0};      // [U], rows of each slice
  View<const int32_t> output_offsets{nullptr, 0};  // [U], where in the receiver's output a slice lands
  View<const int32_t> recv_sizes{nullptr, 0};      // [U], rows that arrive
};

// Refuses what would read or write out of range, or depends on the order of copies: names the rank, the slice and the
// value. Offsets of empty slices mean nothing.
//   sides: [R], by rank.
Status CheckExchange(View<const ExchangeSide> sides);

// Bytes that all ranks together receive. The sides must have passed CheckExchange, here and below.
size_t ExchangedBytes(View<const ExchangeSide> sides);

// Copies what lands at `receiver`. Different receivers may be served at the same time.
void Receive(View<const ExchangeSide> sides, size_t receiver);

}  // namespace moe_lb
