#include "ffi/planning/fastermoe.h"

#include <algorithm>
#include <vector>

#include "ffi/planning/checks.h"
#include "ffi/planning/holders.h"

namespace moe_lb {
namespace {

Status Check(MatrixView<const int32_t> placement, MatrixView<const int32_t> quota, MatrixView<const int32_t> counts,
             const FasterMoeOptions& options, MatrixView<int32_t> new_placement, MatrixView<int32_t> new_quota) {
  if (Status bad = CheckPlan(placement, quota, options.domain, new_placement, new_quota)) return bad;
  if (Status bad = CheckHomes(placement, quota.rows() / placement.rows())) return bad;
  if (Status bad = CheckShape("counts", counts, placement.rows(), quota.rows())) return bad;
  if (options.min_saved < 1 || options.min_saved > kMaxTokens) {
    return Refuse("min_saved is ", options.min_saved, "; expected 1 to ", kMaxTokens);
  }
  return CheckCounts(counts);
}

class Shadows {
 public:
  // Copies experts in `placement` and `quota` in place.
  Shadows(MatrixView<int32_t> placement, MatrixView<int32_t> quota, MatrixView<const int32_t> counts, size_t members)
      : placement_(placement),
        quota_(quota),
        counts_(counts),
        members_(members),
        home_(quota.rows() / placement.rows()),
        load_(placement.rows(), 0),
        open_(placement.rows()),
        at_home_(quota.rows(), 0) {
    for (size_t expert = 0; expert < quota.rows(); ++expert) {
      for (size_t rank = 0; rank < quota.columns(); ++rank) load_[rank] += quota[expert][rank];
    }
    for (size_t rank = 0; rank < placement.rows(); ++rank) {
      open_[rank] = std::count(placement[rank].begin(), placement[rank].end(), -1);
    }
    // Computed once: a copy changes only its expert.
    const Holders holders({placement.flat().data(), placement.rows(), placement.columns()}, quota.rows());
    for (size_t expert = 0; expert < quota.rows(); ++expert) {
      // CheckHomes guarantees a home slot for every expert, so the list of its slots is never empty.
      const bool alone = holders.Next(holders.First(expert)) == Holders::kEnd;
      at_home_[expert] = alone && Tokens(expert) == quota[expert][expert / home_];
    }
  }

  // Balances the domain starting at rank `first`.
  void Balance(size_t first, int64_t min_saved) {
    while (CopyOne(first, min_saved)) {
    }
  }

 private:
  static constexpr size_t kNone = SIZE_MAX;

  int64_t Tokens(size_t expert) const {
    int64_t sum = 0;
    for (size_t rank = 0; rank < counts_.rows(); ++rank) sum += counts_[rank][expert];
    return sum;
  }

  bool CopyOne(size_t first, int64_t min_saved) {
    const auto begin = load_.begin() + static_cast<std::ptrdiff_t>(first);
    const auto most = std::max_element(begin, begin + static_cast<std::ptrdiff_t>(members_));
    const auto donor = static_cast<size_t>(most - load_.begin());
    // The weights are broadcast: either all other ranks of the domain get the expert, or none does, and each serves its
    // own tokens. min_saved is at least 1, so the highest load falls with every copy and the loop of Balance ends.
    const size_t expert = OthersHaveSlots(donor, first) ? Busiest(donor) : kNone;
    if (expert == kNone || *most - HighestAfter(expert, donor, first) < min_saved) return false;
    for (size_t rank = first; rank < first + members_; ++rank) {
      if (rank == donor) continue;
      const int32_t tokens = counts_[rank][expert];
      *std::find(placement_[rank].begin(), placement_[rank].end(), -1) = static_cast<int32_t>(expert);
      --open_[rank];
      quota_[expert][rank] += tokens;
      quota_[expert][donor] -= tokens;
      load_[rank] += tokens;
      load_[donor] -= tokens;
    }
    // The expert is now on every rank of the domain.
    at_home_[expert] = false;
    return true;
  }

  bool OthersHaveSlots(size_t donor, size_t first) const {
    for (size_t rank = first; rank < first + members_; ++rank) {
      if (rank != donor && open_[rank] == 0) return false;
    }
    return true;
  }

  // Returns the donor's busiest home expert served by no other rank. For such an expert, each rank's own tokens are the
  // tokens that a copy takes from home.
  size_t Busiest(size_t donor) const {
    size_t best = kNone;
    for (size_t expert = donor * home_; expert < (donor + 1) * home_; ++expert) {
      if (at_home_[expert] && (best == kNone || quota_[expert][donor] > quota_[best][donor])) best = expert;
    }
    return best;
  }

  // Returns the highest load after a copy, without making it: a copy with too small a saving is not made.
  int64_t HighestAfter(size_t expert, size_t donor, size_t first) const {
    int64_t highest = 0;
    int64_t left = load_[donor];
    for (size_t rank = first; rank < first + members_; ++rank) {
      if (rank == donor) continue;
      highest = std::max(highest, load_[rank] + counts_[rank][expert]);
      left -= counts_[rank][expert];
    }
    return std::max(highest, left);
  }

  MatrixView<int32_t> placement_;
  MatrixView<int32_t> quota_;
  MatrixView<const int32_t> counts_;
  size_t members_;
  size_t home_;                // experts per rank
  std::vector<int64_t> load_;  // per rank
  std::vector<int64_t> open_;  // per rank: empty slots
  std::vector<char> at_home_;  // per expert: whether only its home holds it, and serves all of its tokens
};

}  // namespace

Status FasterMoe(MatrixView<const int32_t> placement, MatrixView<const int32_t> quota, MatrixView<const int32_t> counts,
                 const FasterMoeOptions& options, MatrixView<int32_t> new_placement, MatrixView<int32_t> new_quota) {
  if (Status bad = Check(placement, quota, counts, options, new_placement, new_quota)) return bad;
  std::copy(placement.flat().begin(), placement.flat().end(), new_placement.flat().begin());
  std::copy(quota.flat().begin(), quota.flat().end(), new_quota.flat().begin());
  const auto members = static_cast<size_t>(options.domain);
  Shadows shadows(new_placement, new_quota, counts, members);
  for (size_t first = 0; first < placement.rows(); first += members) shadows.Balance(first, options.min_saved);
  return Ok();
}

}  // namespace moe_lb
