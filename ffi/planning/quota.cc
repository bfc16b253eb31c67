#include "ffi/planning/quota.h"

#include <algorithm>
#include <vector>

#include "ffi/planning/checks.h"
#include "ffi/planning/holders.h"

namespace moe_lb {
namespace {

Status Check(View<const int32_t> tokens, MatrixView<const int32_t> placement, MatrixView<int32_t> quota) {
  if (Status bad = CheckPlacement(placement, tokens.size())) return bad;
  if (Status bad = CheckShape("quota", quota, tokens.size(), placement.rows())) return bad;
  return CheckTokens(tokens);
}

// The ranks that hold an expert, ascending.
void RanksOf(const Holders& holders, size_t expert, size_t slots, std::vector<size_t>& ranks) {
  ranks.clear();
  for (size_t slot = holders.First(expert); slot != Holders::kEnd; slot = holders.Next(slot)) {
    const size_t rank = slot / slots;
    if (ranks.empty() || ranks.back() != rank) ranks.push_back(rank);
  }
}

// The largest level to which `tokens` lift all of `loads` that are below it.
int64_t Level(int64_t tokens, std::vector<int64_t>& loads) {
  std::sort(loads.begin(), loads.end());
  // Spread over the lightest n they reach (tokens + sum of these) / n; the right n reaches least.
  int64_t level = tokens + loads[0];
  int64_t sum = 0;
  for (size_t n = 0; n < loads.size(); ++n) {
    sum += loads[n];
    level = std::min(level, (tokens + sum) / static_cast<int64_t>(n + 1));
  }
  return level;
}

class Pouring {
 public:
  explicit Pouring(size_t num_ranks) : load_(num_ranks, 0) {}

  void Give(View<int32_t> quota, size_t rank, int64_t tokens) {
    quota[rank] += static_cast<int32_t>(tokens);
    load_[rank] += tokens;
  }

  void Pour(View<int32_t> quota, const std::vector<size_t>& ranks, int64_t tokens) {
    loads_.clear();
    for (const size_t rank : ranks) loads_.push_back(load_[rank]);
    const int64_t level = Level(tokens, loads_);
    for (const size_t rank : ranks) {
      const int64_t lift = std::max<int64_t>(level - load_[rank], 0);
      Give(quota, rank, lift);
      tokens -= lift;
    }
    for (const size_t rank : ranks) {
      if (tokens == 0) return;
      if (load_[rank] != level) continue;
      Give(quota, rank, 1);
      --tokens;
    }
  }

 private:
  std::vector<int64_t> load_;
  std::vector<int64_t> loads_;  // those of one expert's ranks
};

}  // namespace

Status Quota(View<const int32_t> tokens, MatrixView<const int32_t> placement, MatrixView<int32_t> quota) {
  if (Status bad = Check(tokens, placement, quota)) return bad;
  std::fill(quota.flat().begin(), quota.flat().end(), 0);
  const Holders holders(placement, tokens.size());
  Pouring pouring(placement.rows());
  std::vector<size_t> ranks;
  std::vector<size_t> shared;
  for (size_t expert = 0; expert < tokens.size(); ++expert) {
    if (tokens[expert] == 0) continue;
    RanksOf(holders, expert, placement.columns(), ranks);
    if (ranks.empty()) {
      return Refuse("tokens of expert ", expert, " is ", tokens[expert], "; expected 0: no slot holds it");
    }
    if (ranks.size() == 1) {
      pouring.Give(quota[expert], ranks[0], tokens[expert]);
    } else {
      shared.push_back(expert);
    }
  }
  std::stable_sort(shared.begin(), shared.end(), [&](size_t a, size_t b) { return tokens[a] > tokens[b]; });
  for (const size_t expert : shared) {
    RanksOf(holders, expert, placement.columns(), ranks);
    pouring.Pour(quota[expert], ranks, tokens[expert]);
  }
  return Ok();
}

}  // namespace moe_lb
