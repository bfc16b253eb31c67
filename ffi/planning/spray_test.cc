#include "ffi/planning/spray.h"

#include <vector>

#include "ffi/common/testing.h"

namespace {

using namespace moe_lb;  // NOLINT: a test
using Ints = std::vector<int32_t>;

// Two nodes of two ranks each, with two rails.
Status Run(const Ints& rows, const Ints& ticks, int64_t ranks_per_node, int64_t chunks, Ints& rails) {
  return Spray({rows.data(), 4, 4}, {ticks.data(), ticks.size()}, {ranks_per_node, chunks},
               {rails.data(), 4, rails.size() / 4});
}

Ints Rails(const Ints& rows, const Ints& ticks, int64_t chunks) {
  Ints rails(32, -1);
  EXPECT(!Run(rows, ticks, 2, chunks, rails));
  return rails;
}

void ChunksAlternateThenRests() {
  // 11 rows from node 0 to node 1, in chunks of 2: rank 0 has three and a rest, rank 1 two.
  const Ints rails = Rails({0, 0, 7, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0}, {1, 1}, 2);
  EXPECT_EQ(rails[4], 3);   // rank 0 to rank 2 on rail 0: the second chunk, and the rest
  EXPECT_EQ(rails[5], 4);   // on rail 1, the first of the rotation: chunks 1 and 3
  EXPECT_EQ(rails[14], 2);  // rank 1 to rank 3
  EXPECT_EQ(rails[15], 2);
}

void ADeadRailGetsNoRowsAndASlowOneFewer() {
  const Ints rows = {0, 0, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
  const Ints dead = Rails(rows, {0, 1}, 4), slow = Rails(rows, {2, 1}, 6);
  EXPECT_EQ(dead[4], 0);
  EXPECT_EQ(dead[5], 12);
  EXPECT_EQ(slow[4], 4);
  EXPECT_EQ(slow[5], 8);
}

void RowsInsideADomainAreOnTheReceiversRail() {
  const Ints rails = Rails({1, 2, 0, 0, 3, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, {1, 1}, 1);
  EXPECT((Ints(rails.begin(), rails.begin() + 4) == Ints{1, 0, 0, 2}));
  EXPECT((Ints(rails.begin() + 8, rails.begin() + 12) == Ints{3, 0, 0, 4}));
}

void BadArgumentsAreNamed() {
  Ints rows(16, 0), rails(32);
  EXPECT_EQ(*Run(rows, {1, 1}, 3, 1, rails), "ranks_per_node is 3; expected a divisor of the 4 ranks");
  EXPECT_EQ(*Run(rows, {1, 1, 1}, 2, 1, rails), "ticks has 3 rails; expected a divisor of the 2 ranks of a node");
  EXPECT_EQ(*Run(rows, {0, 0}, 2, 1, rails), "ticks is 0 for all 2 rails; expected one that is not dead");
  EXPECT_EQ(*Run(rows, {1, -1}, 2, 1, rails), "ticks of rail 1 is -1; expected 1 to 32767, or 0 for a dead one");
  EXPECT_EQ(*Run(rows, {1, 1}, 2, 0, rails), "chunks is 0; expected 1 to 4096");
  EXPECT_EQ(*Run(rows, {1}, 2, 1, rails), "rails has shape [4, 8]; expected [4, 4]");
  rows[6] = -5;
  EXPECT_EQ(*Run(rows, {1, 1}, 2, 1, rails), "rows from rank 1 to 2 is -5; expected at least 0");
  rows[6] = rows[7] = 2147483647;
  EXPECT_EQ(*Run(rows, {1, 1}, 2, 1, rails), "rows sum to 4294967294; expected at most 2147483647");
  EXPECT_EQ(*Spray({rows.data(), 2, 4}, {rows.data(), 1}, {1, 1}, {rails.data(), 2, 4}),
            "rows has shape [2, 4]; expected [R, R], at least 1");
}

}  // namespace

int main() {
  ChunksAlternateThenRests();
  ADeadRailGetsNoRowsAndASlowOneFewer();
  RowsInsideADomainAreOnTheReceiversRail();
  BadArgumentsAreNamed();
}
