#include "ffi/transport/peer_rows.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace moe_lb {
namespace {

constexpr int64_t kMax = std::numeric_limits<int32_t>::max();

Status CheckSizes(MatrixView<const int32_t> wanted, MatrixView<const int32_t> quota, View<const int32_t> first_row) {
  if (quota.columns() != wanted.rows() || quota.rows() != first_row.size()) {
    return Refuse("quota has shape [", quota.rows(), ", ", quota.columns(), "] and first_row ", first_row.size(),
                  " numbers; expected [E, R] and E, with R = ", wanted.rows());
  }
  for (size_t expert = 0; expert < first_row.size(); ++expert) {
    if (first_row[expert] < 0) {
      return Refuse("first_row of expert ", expert, " is ", first_row[expert], "; expected at least 0");
    }
  }
  return Ok();
}

}  // namespace

Status TakeRows(MatrixView<const int32_t> wanted, MatrixView<const int32_t> quota, View<const int32_t> first_row,
                size_t room, MatrixView<int32_t> first, MatrixView<int32_t> size) {
  if (Status bad = CheckSizes(wanted, quota, first_row)) return bad;
  std::vector<int64_t> next(first_row.begin(), first_row.end());
  for (size_t rank = 0; rank < wanted.rows(); ++rank) {
    auto left = static_cast<int64_t>(std::min<size_t>(room, kMax));
    for (size_t slot = 0; slot < wanted.columns(); ++slot) {
      const int32_t expert = wanted[rank][slot];
      if (expert < -1 || expert >= static_cast<int64_t>(quota.rows())) {
        return Refuse("wanted of rank ", rank, ", slot ", slot, " is ", expert, "; expected an expert below ",
                      quota.rows(), ", or -1 for an empty slot");
      }
      const int32_t asked = expert < 0 ? 0 : quota[static_cast<size_t>(expert)][rank];
      if (asked < 0) {
        return Refuse("quota of expert ", expert, ", rank ", rank, " is ", asked, "; expected at least 0");
      }
      const int64_t taken = std::min<int64_t>(left, asked);
      const int64_t start = expert < 0 ? 0 : next[static_cast<size_t>(expert)];
      if (start + taken > kMax) return Refuse("rows of expert ", expert, " end beyond ", kMax, "; expected fewer");
      first[rank][slot] = static_cast<int32_t>(start);
      size[rank][slot] = static_cast<int32_t>(taken);
      left -= taken;
      if (expert >= 0) next[static_cast<size_t>(expert)] += taken;
    }
  }
  return Ok();
}

void AddRowTasks(MatrixView<const int32_t> wanted, MatrixView<const int32_t> first, MatrixView<const int32_t> size,
                 const PeerWeights& weights, std::vector<PeerTask>* tasks) {
  const size_t kind = weights.expert_bytes.size();
  for (size_t rank = 0; rank < wanted.rows(); ++rank) {
    PeerTask task{rank, {}, {}};
    size_t landing = 0;
    for (size_t slot = 0; slot < wanted.columns(); ++slot) {
      const auto start = static_cast<size_t>(first[rank][slot]);
      // Rows beyond the array at home come there in a later round, and somebody else moves those.
      const size_t end = std::min(start + static_cast<size_t>(size[rank][slot]), weights.rows.at_home);
      if (start >= end) continue;
      const size_t home = static_cast<size_t>(wanted[rank][slot]) / weights.num_home;
      task.pieces.push_back({kind, landing, PeerSource::kHome, home, start, 0, (end - start) * weights.rows.row_bytes});
      landing += end - start;
    }
    if (!task.pieces.empty()) tasks->push_back(std::move(task));
  }
}

}  // namespace moe_lb
