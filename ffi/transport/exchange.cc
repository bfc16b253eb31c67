#include "ffi/transport/exchange.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace moe_lb {
namespace {

// Index of the i-th slice to a receiver among the sender's slices, and of the i-th slice from a sender among the
// receiver's sizes. As in `lax.ragged_all_to_all`, every pair of ranks has equally many slices, so a rank can find its
// entry in the arrays of another.
class Slices {
 public:
  explicit Slices(View<const ExchangeSide> sides)
      : per_pair_(sides.size() == 0 ? 0 : sides[0].send_sizes.size() / sides.size()) {}

  size_t per_pair() const { return per_pair_; }
  size_t place(size_t peer, size_t i) const { return peer * per_pair_ + i; }

 private:
  size_t per_pair_;
};

// Compare all lengths with those of rank 0 before any indexing: Slices takes its number of slices per pair from rank 0.
Status CheckLengths(View<const ExchangeSide> sides) {
  for (size_t rank = 0; rank < sides.size(); ++rank) {
    const ExchangeSide& side = sides[rank];
    const size_t num_slices = side.send_sizes.size();
    if (num_slices % sides.size() != 0) {
      return Refuse("rank ", rank, ": send_sizes has ", num_slices, " entries; expected a multiple of the ",
                    sides.size(), " ranks");
    }
    for (const size_t length :
         {side.input_offsets.size(), side.output_offsets.size(), side.recv_sizes.size(), sides[0].send_sizes.size()}) {
      if (length != num_slices) {
        return Refuse("rank ", rank, ": offsets and sizes have ", length, " and ", num_slices,
                      " entries; expected equally many, on all ranks");
      }
    }
    if (side.row_bytes != sides[0].row_bytes) {
      return Refuse("rank ", rank, ": a row has ", side.row_bytes, " bytes; expected the ", sides[0].row_bytes,
                    " of rank 0");
    }
  }
  return Ok();
}

// Checks that `size` rows from `offset` on are within `num_rows`.
Status CheckRange(size_t rank, size_t slice, const char* name, int64_t offset, int64_t size, int64_t num_rows,
                  const char* of) {
  // Both come from int32, so the sum of these int64 cannot overflow.
  if (offset >= 0 && offset + size <= num_rows) return Ok();
  return Refuse("rank ", rank, ": ", name, " of slice ", slice, " is ", offset, "; expected its ", size,
                " rows within the ", num_rows, " rows of ", of);
}

Status CheckSender(View<const ExchangeSide> sides, size_t sender, const Slices& slices) {
  const ExchangeSide& side = sides[sender];
  for (size_t receiver = 0; receiver < sides.size(); ++receiver) {
    for (size_t i = 0; i < slices.per_pair(); ++i) {
      const size_t slice = slices.place(receiver, i);
      const int64_t size = side.send_sizes[slice];
      if (size < 0)
        return Refuse("rank ", sender, ": send_sizes of slice ", slice, " is ", size, "; expected 0 or more");
      const int64_t expected = sides[receiver].recv_sizes[slices.place(sender, i)];
      // Sender and receiver compute the size each from its own plan. If they differ, the receiver would use rows that
      // were not written.
      if (size != expected) {
        return Refuse("rank ", sender, ": send_sizes of slice ", slice, " is ", size, "; rank ", receiver, " expects ",
                      expected, " (recv_sizes of its slice ", slices.place(sender, i), ")");
      }
      if (size == 0) continue;
      if (Status bad = CheckRange(sender, slice, "input_offsets", side.input_offsets[slice], size, side.operand_rows,
                                  "operand")) {
        return bad;
      }
      if (Status bad = CheckRange(sender, slice, "output_offsets", side.output_offsets[slice], size,
                                  sides[receiver].output_rows, "the receiver's output")) {
        return bad;
      }
    }
  }
  return Ok();
}

struct Landing {
  int64_t start, end;
  size_t sender, slice;
};

// Checks that slices in an output do not overlap: the result would depend on the order of the copies, which XLA's own
// exchange on accelerators leaves open. All slices are within the output by now. Sorted by start, two of them overlap
// only if two neighbours do. The sort is stable, so the message names the same slices in every run.
Status CheckLandings(View<const ExchangeSide> sides, size_t receiver, const Slices& slices) {
  std::vector<Landing> landings;
  for (size_t sender = 0; sender < sides.size(); ++sender) {
    for (size_t i = 0; i < slices.per_pair(); ++i) {
      const size_t slice = slices.place(receiver, i);
      const int64_t start = sides[sender].output_offsets[slice], size = sides[sender].send_sizes[slice];
      if (size > 0) landings.push_back({start, start + size, sender, slice});
    }
  }
  const auto by_start = [](const Landing& a, const Landing& b) { return a.start < b.start; };
  std::stable_sort(landings.begin(), landings.end(), by_start);
  for (size_t i = 1; i < landings.size(); ++i) {
    const Landing &before = landings[i - 1], &after = landings[i];
    if (after.start < before.end) {
      return Refuse("rank ", after.sender, ": output_offsets of slice ", after.slice, " is ", after.start,
                    "; expected at least ", before.end, " at rank ", receiver, ", where slice ", before.slice,
                    " of rank ", before.sender, " ends");
    }
  }
  return Ok();
}

}  // namespace

Status CheckExchange(View<const ExchangeSide> sides) {
  if (Status bad = CheckLengths(sides)) return bad;
  const Slices slices(sides);
  for (size_t rank = 0; rank < sides.size(); ++rank) {
    if (Status bad = CheckSender(sides, rank, slices)) return bad;
  }
  for (size_t rank = 0; rank < sides.size(); ++rank) {
    if (Status bad = CheckLandings(sides, rank, slices)) return bad;
  }
  return Ok();
}

size_t ExchangedBytes(View<const ExchangeSide> sides) {
  size_t bytes = 0;
  for (const ExchangeSide& side : sides) {
    for (const int32_t size : side.recv_sizes) bytes += static_cast<size_t>(size) * side.row_bytes;
  }
  return bytes;
}

void Receive(View<const ExchangeSide> sides, size_t receiver) {
  const Slices slices(sides);
  for (const ExchangeSide& sender : sides) {
    for (size_t i = 0; i < slices.per_pair(); ++i) {
      const size_t slice = slices.place(receiver, i);
      const auto size = static_cast<size_t>(sender.send_sizes[slice]);
      // An empty buffer may be a null pointer, which memcpy must not get even with a size of 0.
      if (size == 0 || sender.row_bytes == 0) continue;
      std::memcpy(sides[receiver].output + static_cast<size_t>(sender.output_offsets[slice]) * sender.row_bytes,
                  sender.operand + static_cast<size_t>(sender.input_offsets[slice]) * sender.row_bytes,
                  size * sender.row_bytes);
    }
  }
}

}  // namespace moe_lb
