#include "ffi/planning/eplb_plus.h"

#include <algorithm>
#include <queue>
#include <utility>
#include <vector>

#include "ffi/planning/checks.h"

namespace moe_lb {
namespace {

Status Check(View<const int32_t> tokens, MatrixView<const int32_t> placement, int64_t domain,
             MatrixView<int32_t> new_placement, MatrixView<int32_t> quota) {
  const size_t num_ranks = placement.rows();
  const size_t num_experts = tokens.size();
  if (Status bad = CheckPlacement(placement, num_experts)) return bad;
  if (num_experts % num_ranks != 0 || num_experts == 0) {
    return Refuse("tokens has ", num_experts, " experts; expected a positive multiple of the ", num_ranks, " ranks");
  }
  if (Status bad = CheckDomain(domain, num_ranks)) return bad;
  if (Status bad = CheckShape("new_placement", new_placement, num_ranks, placement.columns())) return bad;
  if (Status bad = CheckShape("quota", quota, num_experts, num_ranks)) return bad;
  return CheckTokens(tokens);
}

class Replicas {
 public:
  // Adds replicas to `placement` in place.
  Replicas(View<const int32_t> tokens, MatrixView<int32_t> placement, size_t members)
      : tokens_(tokens),
        placement_(placement),
        members_(members),
        home_(tokens.size() / placement.rows()),
        holds_(tokens.size() * placement.rows(), false),
        copies_(tokens.size(), 0),
        planned_(tokens.size(), 0),
        open_(placement.rows(), 0),
        load_(placement.rows(), 0) {
    for (size_t rank = 0; rank < num_ranks(); ++rank) {
      const View<int32_t> slots = placement[rank];
      open_[rank] = std::count(slots.begin(), slots.end(), -1);
      ForHeld(rank, [&](size_t expert) { Hold(expert, rank); });
    }
    planned_ = copies_;
  }

  // Returns a failure naming an expert with tokens and without a slot.
  Status CheckHeld() const {
    for (size_t expert = 0; expert < copies_.size(); ++expert) {
      if (copies_[expert] > 0 || tokens_[expert] == 0) continue;
      return Refuse("tokens of expert ", expert, " is ", tokens_[expert], "; expected 0: no slot holds it");
    }
    return Ok();
  }

  void Plan() {
    // Replicate all domains before summing loads: the placement may already hold replicas of another domain's experts,
    // whose shares depend on the number of copies there.
    for (size_t first = 0; first < num_ranks(); first += members_) Replicate(first);
    for (size_t rank = 0; rank < num_ranks(); ++rank) {
      ForHeld(rank, [&](size_t expert) { load_[rank] += Share(expert); });
    }
    for (size_t first = 0; first < num_ranks(); first += members_) Pack(first);
  }

  void Split(MatrixView<int32_t> quota) const {
    std::fill(quota.flat().begin(), quota.flat().end(), 0);
    std::vector<int64_t> before(copies_.size(), 0);
    for (size_t rank = 0; rank < num_ranks(); ++rank) {
      ForHeld(rank, [&](size_t expert) {
        // `copies_` counts the copies made, which may be fewer than planned. Ranks are visited in ascending order, so
        // the lower ones get the remainder.
        const bool extra = before[expert]++ < tokens_[expert] % copies_[expert];
        quota[expert][rank] = static_cast<int32_t>(tokens_[expert] / copies_[expert] + extra);
      });
    }
  }

 private:
  size_t num_ranks() const { return placement_.rows(); }
  bool Holds(size_t expert, size_t rank) const { return holds_[expert * num_ranks() + rank]; }

  void Hold(size_t expert, size_t rank) {
    holds_[expert * num_ranks() + rank] = true;
    ++copies_[expert];
  }

  // Calls `visit` with every expert of the rank, once.
  template <typename Visit>
  void ForHeld(size_t rank, Visit visit) const {
    const View<int32_t> slots = placement_[rank];
    for (int32_t* slot = slots.begin(); slot != slots.end(); ++slot) {
      // Two slots of one expert on a rank share one copy's tokens, so only the first counts.
      if (*slot >= 0 && std::find(slots.begin(), slot, *slot) == slot) {
        visit(static_cast<size_t>(*slot));
      }
    }
  }

  // Tokens of each of the planned copies, rounded up.
  int64_t Share(size_t expert) const {
    const int64_t copies = std::max<int64_t>(planned_[expert], 1);
    return tokens_[expert] / copies + (tokens_[expert] % copies != 0);
  }

  // Maximum number of copies of the expert.
  int64_t Limit(size_t expert, size_t first) const {
    int64_t limit = copies_[expert];
    for (size_t rank = first; rank < first + members_; ++rank) limit += open_[rank] > 0 && !Holds(expert, rank);
    return limit;
  }

  // Sets the number of copies of each expert of the domain starting at rank `first`.
  void Replicate(size_t first) {
    using Candidate = std::pair<int64_t, int64_t>;  // share, -expert: the largest is the lowest of the heaviest
    std::priority_queue<Candidate> candidates;
    for (size_t expert = first * home_; expert < (first + members_) * home_; ++expert) {
      candidates.emplace(Share(expert), -static_cast<int64_t>(expert));
    }
    int64_t empty = 0;
    for (size_t rank = first; rank < first + members_; ++rank) empty += open_[rank];
    // A share of one token cannot be split any further.
    while (empty > 0 && !candidates.empty() && candidates.top().first > 1) {
      const auto expert = static_cast<size_t>(-candidates.top().second);
      candidates.pop();
      // Not queued again: only Pack takes slots, so the limit stays.
      if (planned_[expert] == Limit(expert, first)) continue;
      ++planned_[expert];
      --empty;
      candidates.emplace(Share(expert), -static_cast<int64_t>(expert));
    }
  }

  void Pack(size_t first) {
    std::vector<size_t> order;
    for (size_t expert = first * home_; expert < (first + members_) * home_; ++expert) {
      if (planned_[expert] > copies_[expert]) order.push_back(expert);
    }
    // Large shares go first, because small ones can fill the remaining gaps; ties go to the lower expert.
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return Share(a) > Share(b); });
    for (const size_t expert : order) {
      for (int64_t copy = planned_[expert] - copies_[expert]; copy > 0; --copy) {
        // If one copy fits nowhere, the next one of the same expert fits nowhere either.
        if (!Place(expert, first)) break;
      }
    }
  }

  // Puts one copy on the lightest rank able to take it; returns false if there is none.
  bool Place(size_t expert, size_t first) {
    size_t lightest = num_ranks();
    for (size_t rank = first; rank < first + members_; ++rank) {
      if (open_[rank] == 0 || Holds(expert, rank)) continue;
      if (lightest == num_ranks() || load_[rank] < load_[lightest]) lightest = rank;
    }
    if (lightest == num_ranks()) return false;
    const View<int32_t> slots = placement_[lightest];
    *std::find(slots.begin(), slots.end(), -1) = static_cast<int32_t>(expert);
    Hold(expert, lightest);
    --open_[lightest];
    load_[lightest] += Share(expert);
    return true;
  }

  View<const int32_t> tokens_;
  MatrixView<int32_t> placement_;
  size_t members_;
  size_t home_;                   // experts per rank
  std::vector<bool> holds_;       // [E, R]
  std::vector<int64_t> copies_;   // per expert, ranks holding it
  std::vector<int64_t> planned_;  // likewise, once all copies are made
  std::vector<int64_t> open_;     // per rank, empty slots
  std::vector<int64_t> load_;     // per rank
};

}  // namespace

Status EplbPlus(View<const int32_t> tokens, MatrixView<const int32_t> placement, const EplbPlusOptions& options,
                MatrixView<int32_t> new_placement, MatrixView<int32_t> quota) {
  if (Status bad = Check(tokens, placement, options.domain, new_placement, quota)) return bad;
  std::copy(placement.flat().begin(), placement.flat().end(), new_placement.flat().begin());
  Replicas replicas(tokens, new_placement, static_cast<size_t>(options.domain));
  if (Status bad = replicas.CheckHeld()) return bad;
  replicas.Plan();
  replicas.Split(quota);
  return Ok();
}

}  // namespace moe_lb
