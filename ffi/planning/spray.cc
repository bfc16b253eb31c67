#include "ffi/planning/spray.h"

#include <algorithm>
#include <vector>

#include "ffi/planning/checks.h"

namespace moe_lb {
namespace {

Status Check(MatrixView<const int32_t> rows, View<const int32_t> ticks, const SprayOptions& options,
             MatrixView<int32_t> rails) {
  const size_t ranks = rows.rows();
  const auto [ranks_per_node, chunks] = options;
  if (ranks == 0 || rows.columns() != ranks) {
    return Refuse("rows has shape [", ranks, ", ", rows.columns(), "]; expected [R, R], at least 1");
  }
  if (ranks_per_node < 1 || static_cast<int64_t>(ranks) % ranks_per_node != 0) {
    return Refuse("ranks_per_node is ", ranks_per_node, "; expected a divisor of the ", ranks, " ranks");
  }
  if (ticks.size() == 0 || static_cast<size_t>(ranks_per_node) % ticks.size() != 0) {
    return Refuse("ticks has ", ticks.size(), " rails; expected a divisor of the ", ranks_per_node, " ranks of a node");
  }
  if (chunks < 1 || chunks > kMaxChunks) return Refuse("chunks is ", chunks, "; expected 1 to ", kMaxChunks);
  if (Status bad = CheckShape("rails", rails, ranks, ranks * ticks.size())) return bad;
  bool alive = false;
  for (size_t rail = 0; rail < ticks.size(); ++rail) {
    if (ticks[rail] < 0 || ticks[rail] > kMaxTicks) {
      return Refuse("ticks of rail ", rail, " is ", ticks[rail], "; expected 1 to ", kMaxTicks,
                    ", or 0 for a dead one");
    }
    alive = alive || ticks[rail] > 0;
  }
  if (!alive) return Refuse("ticks is 0 for all ", ticks.size(), " rails; expected one that is not dead");
  int64_t sum = 0;
  for (size_t from = 0; from < ranks; ++from) {
    for (size_t to = 0; to < ranks; ++to) {
      const int64_t size = rows[from][to];
      if (size < 0) return Refuse("rows from rank ", from, " to ", to, " is ", size, "; expected at least 0");
      sum += size;
    }
  }
  if (sum > kMaxTokens) return Refuse("rows sum to ", sum, "; expected at most ", kMaxTokens);
  return Ok();
}

// Loads of the rails between two nodes.
class Rails {
 public:
  Rails(View<const int32_t> ticks, size_t first) : ticks_(ticks), first_(first), loads_(ticks.size(), 0) {}

  // Returns the rail completing first with the additional rows.
  size_t Add(int64_t rows) {
    size_t best = ticks_.size();
    int64_t soonest = 0;
    for (size_t step = 0; step < ticks_.size(); ++step) {
      const size_t rail = (first_ + step) % ticks_.size();
      // At most 2^31 rows are multiplied by less than 2^15 ticks, so the product fits.
      const int64_t done = (loads_[rail] + rows) * ticks_[rail];
      // A dead rail has 0 ticks and would complete at once, so it is skipped. Ties go to the first rail in the
      // cycle.
      if (ticks_[rail] > 0 && (best == ticks_.size() || done < soonest)) {
        best = rail;
        soonest = done;
      }
    }
    loads_[best] += rows;
    return best;
  }

 private:
  View<const int32_t> ticks_;
  size_t first_;
  std::vector<int64_t> loads_;
};

struct Rest {
  int32_t rows;
  size_t from;
  size_t to;
};

// The rows of members [from_first, from_first + members) for [to_first, ...).
void Between(MatrixView<const int32_t> rows, View<const int32_t> ticks, size_t members, size_t from_first,
             size_t to_first, int64_t chunks, MatrixView<int32_t> rails) {
  const size_t num_rails = ticks.size();
  int64_t total = 0;
  for (size_t from = from_first; from < from_first + members; ++from) {
    for (size_t to = to_first; to < to_first + members; ++to) total += rows[from][to];
  }
  const auto chunk = static_cast<int32_t>(std::max<int64_t>(1, total / static_cast<int64_t>(num_rails) / chunks));
  Rails filling(ticks, (from_first / members + to_first / members) % num_rails);
  std::vector<Rest> rests;
  for (size_t from = from_first; from < from_first + members; ++from) {
    for (size_t to = to_first; to < to_first + members; ++to) {
      int32_t left = rows[from][to];
      for (; left >= chunk; left -= chunk) rails[from][to * num_rails + filling.Add(chunk)] += chunk;
      if (left > 0) rests.push_back({left, from, to});
    }
  }
  // Rests follow the chunks and are no larger than a chunk; the largest goes first. So rails of equal speed differ by
  // about one chunk at most.
  std::stable_sort(rests.begin(), rests.end(), [](const Rest& a, const Rest& b) { return a.rows > b.rows; });
  for (const Rest& rest : rests) rails[rest.from][rest.to * num_rails + filling.Add(rest.rows)] += rest.rows;
}

}  // namespace

Status Spray(MatrixView<const int32_t> rows, View<const int32_t> ticks, const SprayOptions& options,
             MatrixView<int32_t> rails) {
  if (Status bad = Check(rows, ticks, options, rails)) return bad;
  const size_t ranks = rows.rows(), num_rails = ticks.size();
  const auto members = static_cast<size_t>(options.ranks_per_node);
  for (size_t from = 0; from < ranks; ++from) {
    for (size_t entry = 0; entry < ranks * num_rails; ++entry) rails[from][entry] = 0;
    // Rows inside a node use no rail, but all entries must add up to the rows: the transport checks it.
    for (size_t to = from / members * members; to < (from / members + 1) * members; ++to) {
      rails[from][to * num_rails + to % members * num_rails / members] = rows[from][to];
    }
  }
  for (size_t from = 0; from < ranks; from += members) {
    for (size_t to = 0; to < ranks; to += members) {
      if (from != to) Between(rows, ticks, members, from, to, options.chunks, rails);
    }
  }
  return Ok();
}

}  // namespace moe_lb
