// Exact-size exchange of rows between ranks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ffi/common/status.h"
#include "ffi/common/view.h"

namespace moe_lb {

// Arguments of one of R ranks, those of `lax.ragged_all_to_all`. There are U slices, a multiple of R. Slices i * U / R
// to (i + 1) * U / R go to rank i. A rank receives slices in the order of the senders.
struct ExchangeSide {
  const std::byte* operand = nullptr;  // [operand_rows, row_bytes]
  int64_t operand_rows = 0;
  std::byte* output = nullptr;  // [output_rows, row_bytes]; rows without a slice keep their value
  int64_t output_rows = 0;
  size_t row_bytes = 0;
  View<const int32_t> input_offsets{nullptr, 0};   // [U], first row of each slice in the operand
  View<const int32_t> send_sizes{nullptr, 0};      // [U], rows of each slice
  View<const int32_t> output_offsets{nullptr, 0};  // [U], first row of each slice in the receiver's output
  View<const int32_t> recv_sizes{nullptr, 0};      // [U], rows received
};

// Return a failure naming rank, slice and value if a slice is out of range or two slices overlap in an output.
// Offsets of empty slices are ignored.
//   sides: [R], by rank.
Status CheckExchange(View<const ExchangeSide> sides);

// Return the bytes received by all ranks together. Here and below, the sides must have passed CheckExchange.
size_t ExchangedBytes(View<const ExchangeSide> sides);

// Copy the slices for `receiver`. Different receivers may run concurrently.
void Receive(View<const ExchangeSide> sides, size_t receiver);

}  // namespace moe_lb
