#include "ffi/planning/feplb.h"

#include <algorithm>
#include <vector>

#include "ffi/planning/checks.h"
#include "ffi/planning/holders.h"

namespace moe_lb {
namespace {

Status CheckOptions(const FeplbOptions& options) {
  if (options.num_dynamic < 1) return Refuse("num_dynamic is ", options.num_dynamic, "; expected at least 1");
  if (options.max_num_dyn < 1) return Refuse("max_num_dyn is ", options.max_num_dyn, "; expected at least 1");
  if (options.tau < 1 || options.tau > kMaxTokens) {
    return Refuse("tau is ", options.tau, "; expected 1 to ", kMaxTokens);
  }
  return Ok();
}

class Moves {
 public:
  // Moves experts in `placement` and `quota` in place.
  Moves(MatrixView<int32_t> placement, MatrixView<int32_t> quota, const FeplbOptions& options)
      : placement_(placement),
        quota_(quota),
        options_(options),
        home_(quota.rows() / placement.rows()),
        holders_({placement.flat().data(), placement.rows(), placement.columns()}, quota.rows()),
        load_(placement.rows(), 0),
        open_(placement.rows()),
        dynamic_(placement.rows()) {
    for (size_t expert = 0; expert < quota.rows(); ++expert) {
      for (size_t rank = 0; rank < quota.columns(); ++rank) load_[rank] += quota[expert][rank];
    }
    for (size_t rank = 0; rank < placement.rows(); ++rank) {
      // The balancer limits the experts taken by a rank, even if it has more empty slots.
      open_[rank] =
          std::min<int64_t>(options.max_num_dyn, std::count(placement[rank].begin(), placement[rank].end(), -1));
      FindDynamic(rank);
    }
  }

  // Balances the domain starting at rank `first`.
  void Balance(size_t first) {
    while (MoveOne(first)) {
    }
  }

 private:
  int64_t Served(size_t expert) const { return quota_[expert][expert / home_]; }

  void FindDynamic(size_t rank) {
    std::vector<size_t>& experts = dynamic_[rank];
    for (size_t expert = rank * home_; expert < (rank + 1) * home_; ++expert) {
      // The tokens that a home serves of an expert change only with its move, so experts below tau can be dropped once.
      // They are last in the order below and displace no other expert.
      if (Served(expert) >= options_.tau) experts.push_back(expert);
    }
    const auto number = std::min(experts.size(), static_cast<size_t>(options_.num_dynamic));
    // A partial sort is not stable, so the comparison resolves ties.
    std::partial_sort(experts.begin(), experts.begin() + static_cast<std::ptrdiff_t>(number), experts.end(),
                      [&](size_t a, size_t b) { return Served(a) != Served(b) ? Served(a) > Served(b) : a < b; });
    experts.resize(number);
  }

  bool MoveOne(size_t first) {
    const auto begin = load_.begin() + static_cast<std::ptrdiff_t>(first);
    const auto most = std::max_element(begin, begin + static_cast<std::ptrdiff_t>(options_.domain));
    const auto donor = static_cast<size_t>(most - load_.begin());
    std::vector<size_t>& experts = dynamic_[donor];
    for (auto expert = experts.begin(); expert != experts.end(); ++expert) {
      const size_t taker = Taker(*expert, first);
      // The taker must end below the donor's present load, or the highest load of the domain would not fall.
      if (taker != kNone && load_[taker] + Served(*expert) < load_[donor]) {
        Move(*expert, donor, taker);
        // An expert moves at most once, which bounds the loop of Balance.
        experts.erase(expert);
        return true;
      }
      if (!options_.skip) break;
    }
    return false;
  }

  // Returns the idlest rank able to take the expert.
  size_t Taker(size_t expert, size_t first) const {
    size_t best = kNone;
    for (size_t rank = first; rank < first + static_cast<size_t>(options_.domain); ++rank) {
      // Search for the expert last, because it walks a list.
      if (open_[rank] == 0 || (best != kNone && load_[rank] >= load_[best]) || Holds(rank, expert)) continue;
      best = rank;
    }
    return best;
  }

  // Replicas of this balancer are not listed, because a moved expert is not a candidate again.
  bool Holds(size_t rank, size_t expert) const {
    for (size_t slot = holders_.First(expert); slot != Holders::kEnd; slot = holders_.Next(slot)) {
      if (slot / placement_.columns() == rank) return true;
    }
    return false;
  }

  void Move(size_t expert, size_t donor, size_t taker) {
    const auto tokens = static_cast<int32_t>(Served(expert));
    *std::find(placement_[taker].begin(), placement_[taker].end(), -1) = static_cast<int32_t>(expert);
    // The home slot stays and serves no tokens: parameters and optimizer state are there, and the next microbatch
    // starts from home again.
    quota_[expert][donor] = 0;
    quota_[expert][taker] += tokens;
    load_[donor] -= tokens;
    load_[taker] += tokens;
    --open_[taker];
  }

  static constexpr size_t kNone = SIZE_MAX;

  MatrixView<int32_t> placement_;
  MatrixView<int32_t> quota_;
  const FeplbOptions& options_;
  size_t home_;  // experts per rank
  Holders holders_;
  std::vector<int64_t> load_;                 // per rank
  std::vector<int64_t> open_;                 // per rank: number of experts it can still take
  std::vector<std::vector<size_t>> dynamic_;  // per rank: movable experts of at least tau tokens, busiest first
};

}  // namespace

Status Feplb(MatrixView<const int32_t> placement, MatrixView<const int32_t> quota, const FeplbOptions& options,
             MatrixView<int32_t> new_placement, MatrixView<int32_t> new_quota) {
  if (Status bad = CheckPlan(placement, quota, options.domain, new_placement, new_quota)) return bad;
  if (Status bad = CheckHomes(placement, quota.rows() / placement.rows())) return bad;
  if (Status bad = CheckOptions(options)) return bad;
  std::copy(placement.flat().begin(), placement.flat().end(), new_placement.flat().begin());
  std::copy(quota.flat().begin(), quota.flat().end(), new_quota.flat().begin());
  Moves moves(new_placement, new_quota, options);
  const auto members = static_cast<size_t>(options.domain);
  for (size_t first = 0; first < placement.rows(); first += members) moves.Balance(first);
  return Ok();
}

}  // namespace moe_lb
