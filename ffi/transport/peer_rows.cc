#include "ffi/transport/peer_rows.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace moe_lb {
namespace {

// Rows of one slot, at home and at the taker.
struct Block {
  size_t home;
  size_t taker;
  size_t at_home;
  size_t at_taker;
  size_t size;
};

Status CheckSlot(size_t rank, size_t slot, size_t num_ranks, int32_t home, int32_t first, int32_t size) {
  const auto where = [&](const char* name) {
    return std::string(name) + " of rank " + std::to_string(rank) + ", slot " + std::to_string(slot);
  };
  if (home < -1 || home >= static_cast<int64_t>(num_ranks)) {
    return Refuse(where("home"), " is ", home, "; expected a rank below ", num_ranks, ", or -1 for no rows");
  }
  if (first < 0) return Refuse(where("first row"), " is ", first, "; expected at least 0");
  if (size < 0) return Refuse(where("rows"), " are ", size, "; expected at least 0");
  if (size > 0 && home < 0) return Refuse(where("rows"), " are ", size, "; expected 0 without a home");
  return Ok();
}

Status FindBlocks(MatrixView<const int32_t> home, MatrixView<const int32_t> first, MatrixView<const int32_t> size,
                  size_t num_at_home, size_t num_taken, std::vector<Block>* blocks) {
  for (size_t rank = 0; rank < home.rows(); ++rank) {
    size_t landing = 0;
    for (size_t slot = 0; slot < home.columns(); ++slot) {
      if (Status bad = CheckSlot(rank, slot, home.rows(), home[rank][slot], first[rank][slot], size[rank][slot])) {
        return bad;
      }
      const auto start = static_cast<size_t>(first[rank][slot]), rows = static_cast<size_t>(size[rank][slot]);
      if (rows == 0) continue;
      // Sums of two int32 and of as many as there are slots fit in 64 bits.
      if (start + rows > num_at_home || landing + rows > num_taken) {
        return Refuse("rows of rank ", rank, ", slot ", slot, " are ", rows, " from ", start, " at home and from ",
                      landing, " there; expected them to end at ", num_at_home, " and ", num_taken);
      }
      blocks->push_back({static_cast<size_t>(home[rank][slot]), rank, start, landing, rows});
      landing += rows;
    }
  }
  return Ok();
}

// Checks that no two slots return rows to the same place: the result would depend on the order of the copies.
Status CheckReturns(std::vector<Block> blocks) {
  const auto start = [](const Block& block) { return std::tie(block.home, block.at_home); };
  std::stable_sort(blocks.begin(), blocks.end(), [&](const Block& a, const Block& b) { return start(a) < start(b); });
  for (size_t i = 1; i < blocks.size(); ++i) {
    const Block &before = blocks[i - 1], &after = blocks[i];
    if (before.home != after.home || before.at_home + before.size <= after.at_home) continue;
    return Refuse("rows of rank ", after.taker, " return to row ", after.at_home, " of rank ", after.home,
                  "; expected at least ", before.at_home + before.size, ", where rows of rank ", before.taker, " end");
  }
  return Ok();
}

bool SameShape(MatrixView<const int32_t> one, MatrixView<const int32_t> other) {
  return one.rows() == other.rows() && one.columns() == other.columns();
}

}  // namespace

Status PlanRowTasks(MatrixView<const int32_t> home, MatrixView<const int32_t> first, MatrixView<const int32_t> size,
                    const PeerWeights& weights, std::vector<PeerTask>* tasks) {
  tasks->clear();
  if (!SameShape(home, first) || !SameShape(home, size)) {
    return Refuse("first row and rows have other shapes than home, [", home.rows(), ", ", home.columns(), "]");
  }
  const PeerRows& rows = *weights.rows;
  const size_t num_at_home = rows.back ? rows.written : rows.read, num_taken = rows.back ? rows.read : rows.written;
  std::vector<Block> blocks;
  if (Status bad = FindBlocks(home, first, size, num_at_home, num_taken, &blocks)) return bad;
  if (rows.back) {
    if (Status bad = CheckReturns(blocks)) return bad;
  }
  for (size_t rank = 0; rank < home.rows(); ++rank) {
    PeerTask task{rank, {}, {}};
    for (const Block& block : blocks) {
      if ((rows.back ? block.home : block.taker) != rank) continue;
      const size_t from_rank = rows.back ? block.taker : block.home;
      const size_t from = rows.back ? block.at_taker : block.at_home, to = rows.back ? block.at_home : block.at_taker;
      for (size_t kind = 0; kind < weights.expert_bytes.size(); ++kind) {
        const size_t bytes = block.size * weights.expert_bytes[kind];
        if (bytes > 0) task.pieces.push_back({kind, to, PeerSource::kHome, from_rank, from, 0, bytes});
      }
    }
    if (!task.pieces.empty()) tasks->push_back(std::move(task));
  }
  return Ok();
}

}  // namespace moe_lb
