#include "ffi/transport/peer_rows.h"

#include <string>
#include <vector>

#include "ffi/common/testing.h"

namespace {

using namespace moe_lb;  // NOLINT: a test

using Table = std::vector<int32_t>;

constexpr size_t kRanks = 3, kSlots = 2;

struct Rows {
  Table wanted;
  Table first = Table(kRanks * kSlots, -9);
  Table size = Table(kRanks * kSlots, -9);
  Status bad;
};

MatrixView<const int32_t> Show(const Table& table, size_t columns) {
  return {table.data(), table.size() / columns, columns};
}

// One home expert a rank.
Rows Take(Table wanted, const Table& quota, const Table& first_row, size_t room) {
  Rows rows;
  rows.wanted = std::move(wanted);
  rows.bad = TakeRows(Show(rows.wanted, kSlots), Show(quota, kRanks), {first_row.data(), first_row.size()}, room,
                      {rows.first.data(), kRanks, kSlots}, {rows.size.data(), kRanks, kSlots});
  return rows;
}

std::vector<PeerTask> TasksOf(const Rows& rows, size_t at_home) {
  PeerWeights weights = {1, {8, 4}, 16};
  weights.rows = {10, at_home, 100};
  std::vector<PeerTask> tasks;
  AddRowTasks(Show(rows.wanted, kSlots), Show(rows.first, kSlots), Show(rows.size, kSlots), weights, &tasks);
  return tasks;
}

void LowerRanksTakeTheFirstRowsAndSlotsUntilThereIsNoRoom() {
  // Rank 1 takes 5 rows of expert 0 and, of 4 rows of expert 2, the 2 that it has room for; rank 2 the next 3 of 0.
  const Rows rows = Take({-1, -1, 0, 2, 0, -1}, {1, 5, 3, 0, 6, 0, 0, 4, 2}, {10, 0, 20}, 7);
  EXPECT(!rows.bad);
  EXPECT((rows.first == Table{0, 0, 10, 20, 15, 0}));
  EXPECT((rows.size == Table{0, 0, 5, 2, 3, 0}));
}

void WhatIsNotAtHomeYetIsLeftOut() {
  const Rows rows = Take({-1, -1, 0, 2, 0, -1}, {1, 5, 3, 0, 6, 0, 0, 4, 2}, {10, 0, 20}, 7);
  const std::vector<PeerTask> tasks = TasksOf(rows, 14);
  EXPECT_EQ(tasks.size(), 1u);
  EXPECT_EQ(tasks[0].to_rank, 1u);
  EXPECT_EQ(tasks[0].pieces.size(), 1u);
  const PeerPiece& piece = tasks[0].pieces[0];
  EXPECT(piece.source == PeerSource::kHome);
  EXPECT_EQ(piece.kind, 2u);
  EXPECT_EQ(piece.from_rank, 0u);
  EXPECT_EQ(piece.from_index, 10u);
  EXPECT_EQ(piece.to_slot, 0u);
  EXPECT_EQ(piece.size, 40u);
}

void RowsLandOneSlotAfterTheOther() {
  const Rows rows = Take({-1, -1, 0, 2, 0, -1}, {1, 5, 3, 0, 6, 0, 0, 4, 2}, {10, 0, 20}, 100);
  const std::vector<PeerTask> tasks = TasksOf(rows, 100);
  EXPECT_EQ(tasks.size(), 2u);
  EXPECT_EQ(tasks[0].pieces.size(), 2u);
  EXPECT_EQ(tasks[0].pieces[1].from_rank, 2u);
  EXPECT_EQ(tasks[0].pieces[1].from_index, 20u);
  EXPECT_EQ(tasks[0].pieces[1].to_slot, 5u);
  EXPECT_EQ(tasks[0].pieces[1].size, 40u);
  EXPECT_EQ(tasks[1].pieces[0].from_index, 15u);
  EXPECT(tasks[0].after.empty() && tasks[1].after.empty());
}

void BadTablesAreRefused() {
  const Table quota = {1, 5, 3, 0, 6, 0, 0, 4, 2}, first = {10, 0, 20};
  EXPECT_EQ(Take({3, -1, -1, -1, -1, -1}, quota, first, 7).bad.value_or(""),
            std::string("wanted of rank 0, slot 0 is 3; expected an expert below 3, or -1 for an empty slot"));
  EXPECT_EQ(Take({2, -1, -1, -1, -1, -1}, {0, 0, 0, 0, 0, 0, -4, 0, 0}, first, 7).bad.value_or(""),
            std::string("quota of expert 2, rank 0 is -4; expected at least 0"));
  EXPECT_EQ(Take({2, -1, -1, -1, -1, -1}, quota, {10, -1, 20}, 7).bad.value_or(""),
            std::string("first_row of expert 1 is -1; expected at least 0"));
  EXPECT_EQ(Take({-1, -1, 0, -1, -1, -1}, quota, {2147483646, 0, 0}, 7).bad.value_or(""),
            std::string("rows of expert 0 end beyond 2147483647; expected fewer"));
}

}  // namespace

int main() {
  LowerRanksTakeTheFirstRowsAndSlotsUntilThereIsNoRoom();
  WhatIsNotAtHomeYetIsLeftOut();
  RowsLandOneSlotAfterTheOther();
  BadTablesAreRefused();
  return 0;
}
