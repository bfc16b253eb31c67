#include "ffi/transport/peer_rows.h"

#include <string>
#include <vector>

#include "ffi/common/testing.h"

namespace {

using namespace moe_lb;  // NOLINT: a test

using Table = std::vector<int32_t>;

constexpr size_t kRanks = 3, kSlots = 2;
// Rank 1 takes 5 rows of rank 0 and 2 of rank 2, and rank 2 the next 3 of rank 0.
const Table kHome = {-1, -1, 0, 2, 0, -1}, kFirst = {0, 0, 10, 20, 15, 0}, kSize = {0, 0, 5, 2, 3, 0};

MatrixView<const int32_t> Show(const Table& table) { return {table.data(), table.size() / kSlots, kSlots}; }

Status Plan(const Table& home, const Table& first, const Table& size, PeerRows rows, std::vector<PeerTask>* tasks) {
  PeerWeights weights = {1, {10, 0, 4}, 16};
  weights.rows = rows;
  return PlanRowTasks(Show(home), Show(first), Show(size), weights, tasks);
}

void ExpectPiece(const PeerPiece& piece, size_t kind, size_t to, size_t from_rank, size_t from, size_t bytes) {
  EXPECT(piece.source == PeerSource::kHome);
  EXPECT_EQ(piece.kind, kind);
  EXPECT_EQ(piece.to_slot, to);
  EXPECT_EQ(piece.from_rank, from_rank);
  EXPECT_EQ(piece.from_index, from);
  EXPECT_EQ(piece.offset, 0u);
  EXPECT_EQ(piece.size, bytes);
}

void RowsLandOneSlotAfterTheOther() {
  std::vector<PeerTask> tasks;
  EXPECT(!Plan(kHome, kFirst, kSize, {30, 7, false}, &tasks));
  EXPECT_EQ(tasks.size(), 2u);
  EXPECT_EQ(tasks[0].to_rank, 1u);
  // A kind without bytes has no piece.
  EXPECT_EQ(tasks[0].pieces.size(), 4u);
  ExpectPiece(tasks[0].pieces[0], 0, 0, 0, 10, 50);
  ExpectPiece(tasks[0].pieces[1], 2, 0, 0, 10, 20);
  ExpectPiece(tasks[0].pieces[3], 2, 5, 2, 20, 8);
  EXPECT_EQ(tasks[1].to_rank, 2u);
  ExpectPiece(tasks[1].pieces[0], 0, 0, 0, 15, 30);
  EXPECT(tasks[0].after.empty() && tasks[1].after.empty());
  // The first row of a slot without rows is not used.
  EXPECT(!Plan(kHome, {99, 0, 10, 20, 15, 99}, kSize, {30, 7, false}, &tasks));
}

void TheyGoBackWhereTheyCameFrom() {
  std::vector<PeerTask> tasks;
  EXPECT(!Plan(kHome, kFirst, kSize, {7, 30, true}, &tasks));
  EXPECT_EQ(tasks.size(), 2u);
  EXPECT_EQ(tasks[0].to_rank, 0u);
  EXPECT_EQ(tasks[0].pieces.size(), 4u);
  ExpectPiece(tasks[0].pieces[0], 0, 10, 1, 0, 50);
  ExpectPiece(tasks[0].pieces[2], 0, 15, 2, 0, 30);
  EXPECT_EQ(tasks[1].to_rank, 2u);
  ExpectPiece(tasks[1].pieces[1], 2, 20, 1, 5, 8);
}

void BadTablesAreRefused() {
  std::vector<PeerTask> tasks;
  const auto refusal = [&](Table home, Table first, Table size, PeerRows rows = {30, 7, false}) {
    return Plan(home, first, size, rows, &tasks).value_or("");
  };
  EXPECT_EQ(refusal({3, -1, -1, -1, -1, -1}, kFirst, kSize),
            std::string("home of rank 0, slot 0 is 3; expected a rank below 3, or -1 for no rows"));
  EXPECT_EQ(refusal(kHome, {0, 0, -1, 0, 0, 0}, kSize),
            std::string("first row of rank 1, slot 0 is -1; expected at least 0"));
  EXPECT_EQ(refusal(kHome, kFirst, {0, 0, 0, 0, 0, -2}),
            std::string("rows of rank 2, slot 1 are -2; expected at least 0"));
  EXPECT_EQ(refusal(kHome, kFirst, {0, 9, 0, 0, 0, 0}),
            std::string("rows of rank 0, slot 1 are 9; expected 0 without a home"));
  const std::string beyond = "rows of rank 1, slot 1 are 2 from 20 at home and from 5 there; expected them to end at ";
  EXPECT_EQ(refusal(kHome, kFirst, kSize, {30, 6, false}), beyond + "30 and 6");
  EXPECT_EQ(refusal(kHome, kFirst, kSize, {6, 30, true}), beyond + "30 and 6");
  EXPECT_EQ(refusal(kHome, kFirst, kSize, {21, 7, false}), beyond + "21 and 7");
  // Rows 10 to 14 of rank 0 are of rank 1. They may be sent twice, and not returned.
  EXPECT_EQ(refusal(kHome, {0, 0, 10, 20, 14, 0}, kSize, {7, 30, true}),
            std::string("rows of rank 2 return to row 14 of rank 0; expected at least 15, where rows of rank 1 end"));
  EXPECT_EQ(refusal(kHome, {0, 0, 10, 20, 14, 0}, kSize), std::string());
  EXPECT_EQ(refusal(kHome, {1, 2, 3, 4}, kSize), std::string("first row and rows have other shapes than home, [3, 2]"));
}

}  // namespace

int main() {
  RowsLandOneSlotAfterTheOther();
  TheyGoBackWhereTheyCameFrom();
  BadTablesAreRefused();
  return 0;
}
