#include "ffi/transport/peer_copies.h"

#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "ffi/common/testing.h"

namespace {

using namespace moe_lb;  // NOLINT: a test

using Table = std::vector<int32_t>;

MatrixView<const int32_t> AsMatrix(const Table& table, size_t ranks) {
  return {table.data(), ranks, table.size() / ranks};
}

std::vector<PeerTask> Plan(const Table& wanted, const Table& relay, size_t ranks, const PeerWeights& weights) {
  std::vector<PeerTask> tasks;
  EXPECT(!PlanPeerTasks(AsMatrix(wanted, ranks), AsMatrix(relay, ranks), weights, &tasks));
  return tasks;
}

std::string Refusal(const Table& wanted, const Table& relay, size_t ranks) {
  std::vector<PeerTask> tasks;
  const PeerWeights weights = {2, {8}, 4};
  return PlanPeerTasks(AsMatrix(wanted, ranks), AsMatrix(relay, ranks), weights, &tasks).value_or("accepted");
}

void WholeExpertsComeInOneTaskPerRank() {
  const auto tasks = Plan({2, -1, 0, 3}, {-1, -1, -1, 1}, 2, {2, {8, 5}, 3});
  EXPECT_EQ(tasks.size(), 2u);
  EXPECT(tasks[0].after.empty() && tasks[1].after.empty());
  EXPECT_EQ(tasks[0].pieces.size(), 4u);
  const PeerPiece& copied = tasks[0].pieces[1];
  EXPECT_EQ(copied.kind, 1u);
  EXPECT(copied.source == PeerSource::kHome);
  EXPECT_EQ(copied.from_rank, 1u);
  EXPECT_EQ(copied.from_index, 0u);
  EXPECT_EQ(copied.offset, 0u);
  EXPECT_EQ(copied.size, 5u);
  EXPECT(tasks[0].pieces[2].source == PeerSource::kZeros);
}

void NoSlotsAndNoBytesMakeNoTasks() {
  EXPECT(Plan({}, {}, 2, {2, {8}, 4}).empty());
  EXPECT(Plan({1, 0}, {-1, -1}, 2, {1, {0}, 4}).empty());
}

// Expert 0 goes 0 -> 1 -> 2 -> 3; every chunk of a rank comes after the same chunk of the rank before.
void AChainForwardsChunkByChunk() {
  const auto tasks = Plan({-1, 0, 0, 0}, {-1, -1, 1, 2}, 4, {1, {10}, 4});
  std::set<size_t> done;
  std::vector<std::set<size_t>> has(4);  // offsets held by each rank
  has[0] = {0, 4, 8};
  size_t first_of_3 = tasks.size(), last_of_2 = 0;
  for (size_t i = 0; i < tasks.size(); ++i) {
    for (const size_t before : tasks[i].after) EXPECT(done.count(before) == 1);
    for (const PeerPiece& piece : tasks[i].pieces) {
      if (piece.source == PeerSource::kZeros) continue;
      EXPECT(has[piece.from_rank].count(piece.offset) == 1);
      EXPECT_EQ(piece.size, piece.offset == 8 ? 2u : 4u);
      has[tasks[i].to_rank].insert(piece.offset);
      if (tasks[i].to_rank == 2) last_of_2 = i;
      if (tasks[i].to_rank == 3 && first_of_3 == tasks.size()) first_of_3 = i;
    }
    done.insert(i);
  }
  for (const auto& offsets : has) EXPECT_EQ(offsets.size(), 3u);
  EXPECT(first_of_3 < last_of_2);
  EXPECT_EQ(tasks.size(), 3u + 3u + 3u + 3u);
}

void ARelayThatIsTheHomeIsTheHome() {
  const auto tasks = Plan({-1, 0, 0}, {-1, 0, 0}, 3, {1, {10}, 4});
  EXPECT_EQ(tasks.size(), 3u);
  EXPECT_EQ(tasks[2].pieces.size(), 1u);
}

void BadEntriesAreNamed() {
  const Table none(4, -1);
  EXPECT_EQ(Refusal({0, 1, 4, 2}, none, 2),
            "wanted of rank 1, slot 0 is 4; expected an expert below 4, or -1 for an empty slot");
  EXPECT_EQ(Refusal({0, -2, 1, 2}, none, 2),
            "wanted of rank 0, slot 1 is -2; expected an expert below 4, or -1 for an empty slot");
  EXPECT_EQ(Refusal({0, 1, 2, 3}, {-1, 2, -1, -1}, 2),
            "relay of rank 0, slot 1 is 2; expected a rank from 0 to 1, or -1 for the expert's home");
  EXPECT_EQ(Refusal({0, 1, 2, 3}, {1, -1, -1, -1}, 2),
            "relay of rank 0, slot 0 is 1; expected a rank holding expert 0");
  EXPECT_EQ(Refusal({5, 0, 0, -1}, {-1, 2, 1, -1}, 4),
            "relay of rank 1, slot 0 is 2; expected a chain from the expert's home without cycles");
  EXPECT_EQ(Refusal({-1, 0}, {-1, 1}, 2),
            "relay of rank 1, slot 0 is 1; expected a chain from the expert's home without cycles");
  std::vector<PeerTask> tasks;
  EXPECT_EQ(*PlanPeerTasks(AsMatrix({0, 1}, 2), AsMatrix({-1, -1}, 2), {2, {8}, 0}, &tasks),
            "chunk_bytes is 0; expected at least 1");
}

void ReplicasComeByRankThenSlot() {
  const Table wanted = {2, 3, 3, -1, 2, 3};
  const auto replicas = ReplicasOf(AsMatrix(wanted, 3), 2, 1);
  EXPECT_EQ(replicas.size(), 2u);
  EXPECT_EQ(replicas[0].size(), 2u);
  EXPECT_EQ(replicas[0][1].rank, 2u);
  EXPECT_EQ(replicas[1].size(), 3u);
  EXPECT_EQ(replicas[1][0].slot, 1u);
  EXPECT_EQ(replicas[1][1].rank, 1u);
  EXPECT_EQ(replicas[1][2].rank, 2u);
}

template <typename T>
std::vector<T> SumOf(PeerNumber number, const std::vector<std::vector<T>>& terms) {
  std::vector<const void*> pointers;
  for (const auto& term : terms) pointers.push_back(term.data());
  std::vector<T> out(terms[0].size());
  SumInOrder(number, pointers, out.size(), out.data());
  return out;
}

void SumsAreInTheOrderOfTheTerms() {
  // 1 is lost beside 2^24, unless it is added before.
  EXPECT_EQ(SumOf<float>(PeerNumber::kF32, {{0x1p24f}, {1.0f}, {-0x1p24f}})[0], 0.0f);
  EXPECT_EQ(SumOf<float>(PeerNumber::kF32, {{0x1p24f}, {-0x1p24f}, {1.0f}})[0], 1.0f);
  EXPECT_EQ(SumOf<double>(PeerNumber::kF64, {{0x1p24}, {1.0}, {-0x1p24}})[0], 1.0);
  std::vector<float> zeros(5000, 7.0f);
  SumInOrder(PeerNumber::kF32, {}, zeros.size(), zeros.data());
  EXPECT_EQ(zeros[4999], 0.0f);
  // More than a block.
  const auto sums = SumOf<float>(PeerNumber::kF32, {std::vector<float>(5000, 1.0f), std::vector<float>(5000, 2.0f)});
  EXPECT(sums == std::vector<float>(5000, 3.0f));
}

void HalfPrecisionIsRoundedOnceToEven() {
  // bfloat16: 1 + 2^-8 is a tie, rounded down to 1, and two of them give 1 + 2^-7.
  const uint16_t one = 0x3f80, tie = 0x3b80, quarter = 0x3b00;
  EXPECT_EQ(SumOf<uint16_t>(PeerNumber::kBf16, {{one}, {tie}})[0], one);
  EXPECT_EQ(SumOf<uint16_t>(PeerNumber::kBf16, {{one}, {tie}, {quarter}})[0], 0x3f81);
  EXPECT_EQ(SumOf<uint16_t>(PeerNumber::kBf16, {{0x7f80}, {0xff80}})[0] & 0x7fc0, 0x7fc0);
  // float16 comes back as it was: every finite number, alone.
  for (uint32_t bits = 0; bits < 0x7c01; ++bits) {
    const auto number = static_cast<uint16_t>(bits);
    EXPECT_EQ(SumOf<uint16_t>(PeerNumber::kF16, {{number}})[0], number);
  }
  EXPECT_EQ(SumOf<uint16_t>(PeerNumber::kF16, {{0x7bff}, {0x7bff}})[0], 0x7c00);  // overflow
  EXPECT_EQ(SumOf<uint16_t>(PeerNumber::kF16, {{0x7c00}, {0xfbff}})[0], 0x7c00);  // infinity stays
  EXPECT_EQ(SumOf<uint16_t>(PeerNumber::kF16, {{0x3c00}, {0x1000}})[0], 0x3c00);  // a tie, to even
  EXPECT_EQ(SumOf<uint16_t>(PeerNumber::kF16, {{0x3c01}, {0x1000}})[0], 0x3c02);  // likewise, up
  EXPECT_EQ(SumOf<uint16_t>(PeerNumber::kF16, {{0x0001}, {0x8003}})[0], 0x8002);  // subnormal
}

}  // namespace

int main() {
  WholeExpertsComeInOneTaskPerRank();
  NoSlotsAndNoBytesMakeNoTasks();
  AChainForwardsChunkByChunk();
  ARelayThatIsTheHomeIsTheHome();
  BadEntriesAreNamed();
  ReplicasComeByRankThenSlot();
  SumsAreInTheOrderOfTheTerms();
  HalfPrecisionIsRoundedOnceToEven();
}
