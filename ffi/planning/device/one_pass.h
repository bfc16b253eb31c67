// The rule of `Greedy` and the first attempt of `UltraEp` by one warp: `OnePass` of ffi/planning.
#pragma once

#include <cmath>

#include "ffi/planning/device/fill.h"
#include "ffi/planning/device/flow.h"
#include "ffi/planning/one_pass.h"

namespace moe_lb::device {

template <typename T, int W>
class OnePass {
 public:
  // Fills a flow as `OnePass::FillGreedy`. fan_out: at least 1.
  static MOE_LB_DEVICE void Greedy(const T& t, Flow<T, W>& flow, const HomeTokens<T>& home, int32_t mean,
                                   int32_t fan_out) {
    OnePass pass(t, flow, home, mean, fan_out);
    while (pass.MoveOne()) {
    }
  }

  // Fills a flow as `OnePass::FillUltraEp`.
  static MOE_LB_DEVICE void UltraEp(const T& t, Flow<T, W>& flow, const HomeTokens<T>& home, int32_t mean, int32_t high,
                                    int32_t fan_out) {
    const float first = ceilf(static_cast<float>(mean) * kUltraEpRise);
    const int32_t limit = first >= static_cast<float>(high) ? high : Most(mean, static_cast<int32_t>(first));
    OnePass pass(t, flow, home, limit, fan_out);
    while (pass.OffloadOne(home)) {
    }
  }

 private:
  MOE_LB_DEVICE OnePass(const T& t, Flow<T, W>& flow, const HomeTokens<T>& home, int32_t limit, int32_t fan_out)
      : t_(t), flow_(flow), limit_(limit) {
    flow.Reset(t, home.tokens, home.load);
    for (int k = 0; k < W; ++k) {
      left_[k] = fan_out;
      ended_[k] = kLanes * k + t.lane() >= flow.shape.num_ranks;
    }
    t.SyncWarp();
  }

  // Room of a rank of this lane that holds no replica of the expert and has a free slot.
  MOE_LB_DEVICE uint32_t RoomFor(int k, const Ranks<W>& holders) const {
    const int rank = kLanes * k + t_.lane();
    const bool able = rank < flow_.shape.num_ranks && (holders.words[k] >> t_.lane() & 1) == 0 &&
                      static_cast<int>(flow_.used[rank]) < flow_.shape.slots;
    return able ? static_cast<uint32_t>(Most(limit_ - static_cast<int32_t>(flow_.load[rank]), 0)) : 0;
  }

  // Adds a replica; ends with a barrier.
  MOE_LB_DEVICE void Make(int donor, int expert, int rank, int32_t tokens) {
    t_.SyncWarp();  // all have read
    if (t_.lane() == 0) flow_.Append(expert, rank, tokens);
    ++flow_.num_entries;
    for (int k = 0; k < W; ++k) left_[k] -= kLanes * k + t_.lane() == donor ? 1 : 0;
    t_.SyncWarp();
  }

  // The largest amount of any lane and the lowest number of such.
  struct Offer {
    uint32_t tokens, number;
  };

  MOE_LB_DEVICE Offer BestOf(const Offer& mine) const {
    const uint32_t tokens = t_.Max(mine.tokens);
    return {tokens, t_.Min(mine.tokens == tokens ? mine.number : UINT32_MAX)};
  }

  // ---- Greedy ----------------------------------------------------------------------

  // False: no rank has a surplus that may move.
  MOE_LB_DEVICE bool MoveOne() {
    uint32_t amounts[size_t{W}];
    for (int k = 0; k < W; ++k) {
      const int rank = kLanes * k + t_.lane();
      amounts[k] = ended_[k] ? 0 : static_cast<uint32_t>(Most(static_cast<int32_t>(flow_.load[rank]) - limit_, 0));
    }
    const Peak donor = FindPeak<W>(t_, amounts);
    if (donor.rank < 0) return false;
    for (int k = 0; k < W; ++k) amounts[k] = RoomFor(k, NoRanks<W>());
    const Peak idlest = FindPeak<W>(t_, amounts);
    const Offer kept = BestReplica(donor.rank);
    Offer made = {0, 0};
    if (ValueOf<W>(t_, left_, donor.rank) > 0 && idlest.rank >= 0) made = BestNew(donor.rank, idlest.rank);
    made.tokens = Least(made.tokens, idlest.amount);
    const bool makes = made.tokens > kept.tokens;
    const auto tokens = static_cast<int32_t>(Least(makes ? made.tokens : kept.tokens, donor.amount));
    if (tokens == 0) {
      for (int k = 0; k < W; ++k) ended_[k] = ended_[k] || kLanes * k + t_.lane() == donor.rank;
    } else if (makes) {
      Make(donor.rank, static_cast<int>(made.number), idlest.rank, tokens);
    } else {
      MoveTokens(static_cast<int>(kept.number), tokens);
    }
    return true;
  }

  // Of the replicas of the donor's experts, the one that can take the most.
  MOE_LB_DEVICE Offer BestReplica(int donor) const {
    Offer best = {0, UINT32_MAX};
    for (int slot = t_.lane(); slot < flow_.shape.all_slots(); slot += kLanes) {
      const int rank = flow_.RankOf(slot);
      if (slot - rank * flow_.shape.slots >= static_cast<int>(flow_.used[rank])) continue;
      const int expert = flow_.expert[slot];
      if (flow_.HomeOf(expert) != donor) continue;
      const int32_t room = Most(limit_ - static_cast<int32_t>(flow_.load[rank]), 0);
      const auto tokens = static_cast<uint32_t>(Least(static_cast<int32_t>(flow_.tokens[expert]), room));
      if (tokens > best.tokens) best = {tokens, static_cast<uint32_t>(slot)};
    }
    return BestOf(best);
  }

  // Of the donor's experts, the one with the most tokens that the rank does not hold.
  MOE_LB_DEVICE Offer BestNew(int donor, int rank) const {
    Offer best = {0, UINT32_MAX};
    for (int place = t_.lane(); place < flow_.shape.home; place += kLanes) {
      const int expert = donor * flow_.shape.home + place;
      const auto tokens = static_cast<uint32_t>(flow_.tokens[expert]);
      if (tokens > best.tokens && !flow_.HoldersOf(expert).Has(rank)) best = {tokens, static_cast<uint32_t>(expert)};
    }
    return BestOf(best);
  }

  // Moves tokens to the replica in a slot.
  MOE_LB_DEVICE void MoveTokens(int slot, int32_t tokens) {
    const int expert = flow_.expert[slot];
    t_.SyncWarp();  // all have read
    if (t_.lane() == 0) {
      flow_.tokens[expert] -= tokens;
      flow_.tokens[flow_.shape.num_experts + slot] += tokens;
      flow_.load[flow_.HomeOf(expert)] -= tokens;
      flow_.load[flow_.RankOf(slot)] += tokens;
    }
    t_.SyncWarp();
  }

  // ---- UltraEP ---------------------------------------------------------------------

  // False: no rank is above the limit, or its surplus does not fit.
  MOE_LB_DEVICE bool OffloadOne(const HomeTokens<T>& home) {
    uint32_t amounts[size_t{W}];
    for (int k = 0; k < W; ++k) {
      const int rank = kLanes * k + t_.lane();
      const int32_t load = ended_[k] ? 0 : static_cast<int32_t>(home.load[rank]);
      amounts[k] = load > limit_ ? static_cast<uint32_t>(load) : 0;
    }
    const Peak donor = FindPeak<W>(t_, amounts);
    if (donor.rank < 0) return false;
    for (int k = 0; k < W; ++k) ended_[k] = ended_[k] || kLanes * k + t_.lane() == donor.rank;
    uint32_t need = donor.amount - static_cast<uint32_t>(limit_);
    Offer expert = {UINT32_MAX, 0};
    while (need > 0) {
      expert = NextExpert(home, donor.rank, expert);
      // The home keeps one token.
      if (expert.tokens <= 1) return false;
      GiveExpert(donor.rank, static_cast<int>(expert.number), expert.tokens - 1, &need);
    }
    return true;
  }

  // The expert of a rank behind `last` in the order of tokens, most first.
  MOE_LB_DEVICE Offer NextExpert(const HomeTokens<T>& home, int rank, const Offer& last) const {
    Offer best = {0, UINT32_MAX};
    for (int place = t_.lane(); place < flow_.shape.home; place += kLanes) {
      const auto expert = static_cast<uint32_t>(rank * flow_.shape.home + place);
      const auto tokens = static_cast<uint32_t>(home.tokens[static_cast<int>(expert)]);
      const bool is_behind = tokens < last.tokens || (tokens == last.tokens && expert > last.number);
      if (is_behind && tokens > best.tokens) best = {tokens, expert};
    }
    return BestOf(best);
  }

  MOE_LB_DEVICE void GiveExpert(int donor, int expert, uint32_t left, uint32_t* need) {
    while (left > 0 && *need > 0) {
      const Ranks<W> holders = flow_.HoldersOf(expert);
      uint32_t amounts[size_t{W}];
      uint32_t candidates = 0;
      for (int k = 0; k < W; ++k) {
        amounts[k] = RoomFor(k, holders);
        candidates += static_cast<uint32_t>(NumBits(t_.Ballot(amounts[k] > 0)));
      }
      if (candidates == 0 || ValueOf<W>(t_, left_, donor) == 0) return;
      const Peak taker = FindPeak<W>(t_, amounts);
      const uint32_t tokens = Least(Least(*need, taker.amount), left);
      if (tokens < *need / candidates + (*need % candidates != 0 ? 1 : 0)) return;
      Make(donor, expert, taker.rank, static_cast<int32_t>(tokens));
      left -= tokens;
      *need -= tokens;
    }
  }

  const T& t_;
  Flow<T, W>& flow_;
  int32_t limit_;
  // Of the ranks of this lane: replicas that their experts may still get, and whether they give no more.
  int32_t left_[size_t{W}];
  bool ended_[size_t{W}];
};

}  // namespace moe_lb::device
