#include "ffi/transport/exchange.h"

#include <numeric>
#include <random>
#include <vector>

#include "ffi/common/testing.h"

namespace {

using namespace moe_lb;  // NOLINT: a test

using Integers = std::vector<int32_t>;

// One rank and the memory behind its views: rows of `row_bytes` bytes.
struct Rank {
  std::vector<std::byte> operand, output;
  Integers input_offsets, send_sizes, output_offsets, recv_sizes;
  size_t row_bytes = 1;

  ExchangeSide side() {
    const auto view = [](const Integers& values) { return View<const int32_t>(values.data(), values.size()); };
    const auto rows = [&](const std::vector<std::byte>& bytes) {
      return static_cast<int64_t>(row_bytes == 0 ? 0 : bytes.size() / row_bytes);
    };
    return {operand.data(),      rows(operand),    output.data(),        rows(output),    row_bytes,
            view(input_offsets), view(send_sizes), view(output_offsets), view(recv_sizes)};
  }
};

std::vector<ExchangeSide> Sides(std::vector<Rank>& ranks) {
  std::vector<ExchangeSide> sides;
  for (Rank& rank : ranks) sides.push_back(rank.side());
  return sides;
}

Status Run(std::vector<Rank>& ranks) {
  const std::vector<ExchangeSide> sides = Sides(ranks);
  if (Status bad = CheckExchange({sides.data(), sides.size()})) return bad;
  for (size_t rank = 0; rank < ranks.size(); ++rank) Receive({sides.data(), sides.size()}, rank);
  return Ok();
}

// Random sizes, `per_pair` slices from every rank to every rank, landing one after the other.
std::vector<Rank> Draw(size_t num_ranks, size_t per_pair, size_t row_bytes, std::mt19937& random) {
  const size_t slices = num_ranks * per_pair;
  std::vector<Rank> ranks(num_ranks);
  for (Rank& rank : ranks) {
    rank.row_bytes = row_bytes;
    rank.operand.resize(64 * row_bytes);
    for (std::byte& byte : rank.operand) byte = static_cast<std::byte>(random());
    rank.output_offsets.resize(slices);
    rank.recv_sizes.resize(slices);
    for (size_t slice = 0; slice < slices; ++slice) {
      const int32_t size = random() % 3 == 0 ? 0 : static_cast<int32_t>(random() % 64);
      rank.send_sizes.push_back(size);
      rank.input_offsets.push_back(static_cast<int32_t>(random() % static_cast<unsigned>(65 - size)));
    }
  }
  for (size_t to = 0; to < num_ranks; ++to) {
    int32_t end = 3;  // first rows receive no slice
    for (size_t from = 0; from < num_ranks; ++from) {
      for (size_t i = 0; i < per_pair; ++i) {
        const int32_t size = ranks[from].send_sizes[to * per_pair + i];
        ranks[from].output_offsets[to * per_pair + i] = size == 0 ? -7 : end;  // ignored for an empty slice
        ranks[to].recv_sizes[from * per_pair + i] = size;
        end += size;
      }
    }
    ranks[to].output.assign(static_cast<size_t>(end + 2) * row_bytes, std::byte{0xee});
  }
  return ranks;
}

void RowsLandAtTheirOutputOffsets() {
  std::mt19937 random(0);
  for (const size_t num_ranks : {1U, 2U, 5U, 8U}) {
    for (const size_t per_pair : {1U, 3U}) {
      for (const size_t row_bytes : {1U, 12U}) {
        std::vector<Rank> ranks = Draw(num_ranks, per_pair, row_bytes, random);
        std::vector<std::vector<std::byte>> expected;
        size_t bytes = 0;
        for (const Rank& rank : ranks) expected.push_back(rank.output);
        for (const Rank& from : ranks) {
          for (size_t slice = 0; slice < from.send_sizes.size(); ++slice) {
            const auto size = static_cast<size_t>(from.send_sizes[slice]) * row_bytes;
            bytes += size;
            for (size_t i = 0; i < size; ++i) {
              expected[slice / per_pair][static_cast<size_t>(from.output_offsets[slice]) * row_bytes + i] =
                  from.operand[static_cast<size_t>(from.input_offsets[slice]) * row_bytes + i];
            }
          }
        }
        const std::vector<ExchangeSide> sides = Sides(ranks);
        EXPECT_EQ(ExchangedBytes({sides.data(), sides.size()}), bytes);
        EXPECT(!Run(ranks));
        for (size_t rank = 0; rank < num_ranks; ++rank) EXPECT(ranks[rank].output == expected[rank]);
      }
    }
  }
}

// Two ranks of 4 rows; rank 0 sends 2 rows to rank 1.
std::vector<Rank> Pair() {
  Rank first, second;
  first.operand = second.operand = std::vector<std::byte>(4, std::byte{1});
  first.output = second.output = std::vector<std::byte>(4, std::byte{0});
  first.input_offsets = {0, 1};
  first.send_sizes = {0, 2};
  first.output_offsets = {0, 2};
  first.recv_sizes = second.input_offsets = second.send_sizes = second.output_offsets = {0, 0};
  second.recv_sizes = {2, 0};
  return {first, second};
}

void ErrorsAreNamedAndNoRowIsCopied() {
  const auto refusal = [](auto&& change) {
    std::vector<Rank> ranks = Pair();
    change(ranks);
    const std::string message = Run(ranks).value_or("none");
    if (message != "none") {
      for (const Rank& rank : ranks) EXPECT(rank.output == std::vector<std::byte>(4, std::byte{0}));
    }
    return message;
  };
  using Ranks = std::vector<Rank>;
  EXPECT_EQ(refusal([](Ranks&) {}), "none");
  EXPECT_EQ(refusal([](Ranks& ranks) { ranks[0].send_sizes[1] = -1; }),
            "rank 0: send_sizes of slice 1 is -1; expected 0 or more");
  EXPECT_EQ(refusal([](Ranks& ranks) { ranks[1].recv_sizes[0] = 3; }),
            "rank 0: send_sizes of slice 1 is 2; rank 1 expects 3 (recv_sizes of its slice 0)");
  EXPECT_EQ(refusal([](Ranks& ranks) { ranks[0].input_offsets[1] = 3; }),
            "rank 0: input_offsets of slice 1 is 3; expected its 2 rows within the 4 rows of operand");
  EXPECT_EQ(refusal([](Ranks& ranks) { ranks[0].input_offsets[1] = -1; }),
            "rank 0: input_offsets of slice 1 is -1; expected its 2 rows within the 4 rows of operand");
  EXPECT_EQ(refusal([](Ranks& ranks) { ranks[0].output_offsets[1] = 2147483647; }),
            "rank 0: output_offsets of slice 1 is 2147483647; expected its 2 rows within the 4 rows of the receiver's "
            "output");
  EXPECT_EQ(refusal([](Ranks& ranks) {
              ranks[1].send_sizes = {0, 1};
              ranks[1].recv_sizes = {2, 1};
              ranks[1].output_offsets = {0, 3};
            }),
            "rank 1: output_offsets of slice 1 is 3; expected at least 4 at rank 1, where slice 1 of rank 0 ends");
  EXPECT_EQ(refusal([](Ranks& ranks) { ranks[1].send_sizes = {0, 0, 0}; }),
            "rank 1: send_sizes has 3 entries; expected a multiple of the 2 ranks");
  EXPECT_EQ(refusal([](Ranks& ranks) { ranks[1].output_offsets = {}; }),
            "rank 1: offsets and sizes have 0 and 2 entries; expected equally many, on all ranks");
  EXPECT_EQ(refusal([](Ranks& ranks) { ranks[1].row_bytes = 2; }),
            "rank 1: a row has 2 bytes; expected the 1 of rank 0");
}

// Random arguments: refused or copied, never out of bounds (checked by the sanitizers).
void RandomNumbersNeverLeaveTheBuffers() {
  std::mt19937 random(1);
  int num_copied = 0;
  const auto draw = [&] {
    return static_cast<int32_t>(random() % 50 == 0 ? random() : static_cast<unsigned>(random() % 8) - 1U);
  };
  for (int i = 0; i < 20000; ++i) {
    std::vector<Rank> ranks = Draw(2 + random() % 2, 1 + random() % 2, random() % 3, random);
    for (int changes = static_cast<int>(random() % 3); changes > 0; --changes) {
      Rank& rank = ranks[random() % ranks.size()];
      Integers* const all[] = {&rank.input_offsets, &rank.send_sizes, &rank.output_offsets, &rank.recv_sizes};
      Integers& changed = *all[random() % 4];
      changed[random() % changed.size()] = draw();
    }
    if (!Run(ranks)) ++num_copied;
  }
  EXPECT(num_copied > 1000 && num_copied < 19000);
}

void NoRanksNoSlices() {
  std::vector<Rank> none, empty(2);
  EXPECT(!Run(none));
  EXPECT(!Run(empty));
}

}  // namespace

int main() {
  RowsLandAtTheirOutputOffsets();
  ErrorsAreNamedAndNoRowIsCopied();
  RandomNumbersNeverLeaveTheBuffers();
  NoRanksNoSlices();
}
