#include "ffi/planning/greedy.h"

#include <algorithm>
#include <vector>

#include "ffi/planning/checks.h"
#include "ffi/planning/holders.h"

namespace moe_lb {
namespace {

Status Check(MatrixView<const int32_t> placement, MatrixView<const int32_t> quota, const GreedyOptions& options,
             MatrixView<int32_t> new_placement, MatrixView<int32_t> new_quota) {
  if (Status bad = CheckPlan(placement, quota, options.domain, new_placement, new_quota)) return bad;
  if (options.min_tokens < 1) return Refuse("min_tokens is ", options.min_tokens, "; expected at least 1");
  return Ok();
}

// Number of tokens that a slot can take; none by default.
struct Offer {
  size_t expert = 0;
  size_t slot = 0;
  int64_t tokens = 0;
};

// The moves of all domains. A plan is on the critical path of every microbatch, so the inputs of each move are updated
// incrementally: surplus and room of the ranks, the slots holding an expert, and the experts served by a donor.
class Moves {
 public:
  // Moves tokens in `placement` and `quota` in place.
  Moves(MatrixView<int32_t> placement, MatrixView<int32_t> quota, size_t members, int64_t min_tokens)
      : placement_(placement),
        quota_(quota),
        members_(members),
        min_tokens_(min_tokens),
        holders_({placement.flat().data(), placement.rows(), placement.columns()}, quota.rows()),
        surplus_(placement.rows(), 0),
        room_(placement.rows(), 0),
        serves_(placement.rows()) {
    std::vector<int64_t> load(num_ranks(), 0);
    for (size_t expert = 0; expert < quota.rows(); ++expert) {
      for (size_t rank = 0; rank < num_ranks(); ++rank) load[rank] += quota[expert][rank];
    }
    for (size_t first = 0; first < num_ranks(); first += members) SetSurplus(load, first);
    FindServed();
  }

  // Balances the domain starting at rank `first`.
  void Balance(size_t first) {
    const auto begin = surplus_.begin() + static_cast<std::ptrdiff_t>(first);
    const auto end = begin + static_cast<std::ptrdiff_t>(members_);
    for (auto most = std::max_element(begin, end); *most > 0; most = std::max_element(begin, end)) {
      DonateFrom(static_cast<size_t>(most - surplus_.begin()), first);
    }
  }

 private:
  size_t num_ranks() const { return placement_.rows(); }
  size_t RankOf(size_t slot) const { return slot / placement_.columns(); }

  void SetSurplus(const std::vector<int64_t>& load, size_t first) {
    const auto members = static_cast<int64_t>(members_);
    int64_t sum = 0;
    for (size_t rank = first; rank < first + members_; ++rank) sum += load[rank];
    // The mean is rounded up, so that the total room is at least the total surplus.
    const int64_t mean = (sum + members - 1) / members;
    for (size_t rank = first; rank < first + members_; ++rank) {
      surplus_[rank] = std::max<int64_t>(load[rank] - mean, 0);
      room_[rank] = std::max<int64_t>(mean - load[rank], 0);
    }
  }

  // A rank with a surplus never receives, so the set of its served experts can only shrink.
  void FindServed() {
    std::vector<size_t> donors;
    for (size_t rank = 0; rank < num_ranks(); ++rank) {
      if (surplus_[rank] > 0) donors.push_back(rank);
    }
    for (size_t expert = 0; expert < quota_.rows(); ++expert) {
      for (const size_t rank : donors) {
        if (quota_[expert][rank] > 0) serves_[rank].push_back(expert);
      }
    }
  }

  void DonateFrom(size_t donor, size_t first) {
    const Offer kept = BestReplica(donor, first);
    const Offer made = BestNew(donor, first);
    const int64_t surplus = surplus_[donor];
    const bool make = made.tokens > kept.tokens && std::min(made.tokens, surplus) >= min_tokens_;
    const Offer& taker = make ? made : kept;
    const int64_t tokens = std::min(taker.tokens, surplus);
    // A donor without a taker is not tried again, even if a rank gains room later. This bounds the loop of Balance.
    if (tokens == 0) {
      surplus_[donor] = 0;
      return;
    }
    // The slot is recorded before the tokens move there: the next move may give more to it.
    if (make) {
      placement_.flat()[made.slot] = static_cast<int32_t>(made.expert);
      holders_.Add(made.expert, made.slot);
    }
    const View<int32_t> quota = quota_[taker.expert];
    quota[donor] -= static_cast<int32_t>(tokens);
    quota[RankOf(taker.slot)] += static_cast<int32_t>(tokens);
    surplus_[donor] -= tokens;
    room_[RankOf(taker.slot)] -= tokens;
  }

  // Returns the existing slot able to take the most tokens. Experts are visited in ascending order and slots are not,
  // so ties are resolved by slot, as in the JAX reference, which visits slots in order.
  Offer BestReplica(size_t donor, size_t first) const {
    Offer best;
    for (const size_t expert : serves_[donor]) {
      const int64_t served = quota_[expert][donor];
      // Equal amounts are compared too, because a lower slot wins.
      if (served < best.tokens) continue;
      for (size_t slot = holders_.First(expert); slot != Holders::kEnd; slot = holders_.Next(slot)) {
        if (!IsInside(RankOf(slot), first)) continue;
        const int64_t tokens = std::min(served, room_[RankOf(slot)]);
        const bool better = tokens > best.tokens || (tokens == best.tokens && slot < best.slot);
        if (better) best = {expert, slot, tokens};
      }
    }
    return best;
  }

  // Returns the offer of an empty slot of the idlest rank. An expert of another domain has no replica here, because its
  // weights would cross domains.
  Offer BestNew(size_t donor, size_t first) const {
    Offer best;
    const auto [slot, room] = IdlestEmptySlot(first);
    if (room == 0) return best;
    const size_t home_experts = quota_.rows() / num_ranks();
    for (const size_t expert : serves_[donor]) {
      const int64_t served = quota_[expert][donor];
      // A second slot of the expert on a rank has no effect.
      const bool allowed = IsInside(expert / home_experts, first) && !Holds(RankOf(slot), expert);
      if (allowed && served > best.tokens) best = {expert, slot, served};
    }
    best.tokens = std::min(best.tokens, room);
    return best;
  }

  struct EmptySlot {
    size_t slot;
    int64_t room;  // 0: no rank has both room and an empty slot
  };

  EmptySlot IdlestEmptySlot(size_t first) const {
    EmptySlot best = {0, 0};
    for (size_t rank = first; rank < first + members_; ++rank) {
      // Strictly more room is required, so that ties go to the lower rank.
      if (room_[rank] <= best.room) continue;
      const View<int32_t> slots = placement_[rank];
      const auto empty = std::find_if(slots.begin(), slots.end(), [](int32_t expert) { return expert < 0; });
      if (empty != slots.end()) best = {static_cast<size_t>(empty - placement_.flat().begin()), room_[rank]};
    }
    return best;
  }

  bool IsInside(size_t rank, size_t first) const { return rank >= first && rank < first + members_; }

  bool Holds(size_t rank, size_t expert) const {
    for (size_t slot = holders_.First(expert); slot != Holders::kEnd; slot = holders_.Next(slot)) {
      if (RankOf(slot) == rank) return true;
    }
    return false;
  }

  MatrixView<int32_t> placement_;
  MatrixView<int32_t> quota_;
  size_t members_;
  int64_t min_tokens_;
  Holders holders_;
  std::vector<int64_t> surplus_;             // per rank; 0 once it can give no more
  std::vector<int64_t> room_;                // per rank
  std::vector<std::vector<size_t>> serves_;  // per rank with a surplus: served experts, ascending
};

}  // namespace

Status Greedy(MatrixView<const int32_t> placement, MatrixView<const int32_t> quota, const GreedyOptions& options,
              MatrixView<int32_t> new_placement, MatrixView<int32_t> new_quota) {
  if (Status bad = Check(placement, quota, options, new_placement, new_quota)) return bad;
  // XLA may reuse the operands, so the plan is edited in the results.
  std::copy(placement.flat().begin(), placement.flat().end(), new_placement.flat().begin());
  std::copy(quota.flat().begin(), quota.flat().end(), new_quota.flat().begin());
  const auto members = static_cast<size_t>(options.domain);
  Moves moves(new_placement, new_quota, members, options.min_tokens);
  for (size_t first = 0; first < placement.rows(); first += members) moves.Balance(first);
  return Ok();
}

}  // namespace moe_lb
