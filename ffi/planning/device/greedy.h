// `Greedy` of ffi/planning as one launch: a block for each domain, whose threads compare slots and experts. Equal
// plans.
//
// All warps have the same surplus and room of the ranks, and decide the same.
#pragma once

#include "ffi/planning/device/edit.h"

namespace moe_lb::device {

template <typename T, int W>
class GreedyPlanner {
 public:
  // domain: the number of this block.
  static MOE_LB_DEVICE void Run(const T& t, const GreedyCall& call, int domain) {
    const GreedyLayout at = LayOut(call);
    EditedPlan<T, W> plan(t, call.plan, domain, at.plan);
    if (call.keeps_quota) {
      plan.quota = t.template Shared<int32_t>(at.quota, Size(call.plan.all_experts) * Size(plan.num_ranks));
      plan.stride = plan.num_ranks;
    }
    if (!plan.Load(false)) return;
    GreedyPlanner planner(t, call, plan, at);
    t.SyncBlock();
    while (planner.MoveOne()) {
    }
    plan.WritePlacement();
    if (call.keeps_quota) planner.WriteQuota();
  }

 private:
  template <typename V>
  using Array = typename T::template Array<V>;

  // The most tokens that any slot or expert can take, and the lowest number of such.
  struct Offer {
    uint32_t tokens;
    uint32_t number;
  };

  MOE_LB_DEVICE GreedyPlanner(const T& t, const GreedyCall& call, const EditedPlan<T, W>& plan, const GreedyLayout& at)
      : t_(t), call_(call), plan_(plan) {
    offers_ = t.template Shared<uint32_t>(at.offers, 4 * kWarps);
    all_room_ = t.template Shared<uint32_t>(at.room, Size(plan.num_ranks));
    plan.CountEmpty(open_);
    uint64_t sum = 0;
    for (int rank = 0; rank < plan.num_ranks; ++rank) sum += static_cast<uint32_t>(plan.load[rank]);
    const auto ranks = static_cast<uint32_t>(plan.num_ranks);
    const auto mean = static_cast<uint32_t>((sum + ranks - 1) / ranks);
    for (int k = 0; k < W; ++k) {
      const int rank = kLanes * k + t.lane();
      const uint32_t load = rank < plan.num_ranks ? static_cast<uint32_t>(plan.load[rank]) : mean;
      surplus_[k] = Most(load, mean) - mean;
      room_[k] = mean - Least(load, mean);
      if (t.warp() == 0 && rank < plan.num_ranks) all_room_[rank] = room_[k];
    }
  }

  // False: no rank has a surplus that may move.
  MOE_LB_DEVICE bool MoveOne() {
    const Peak donor = FindPeak<W>(t_, surplus_);
    if (donor.rank < 0) return false;
    uint32_t rooms[size_t{W}];
    for (int k = 0; k < W; ++k) rooms[k] = open_[k] > 0 ? room_[k] : 0;
    const Peak idlest = FindPeak<W>(t_, rooms);
    const Offer mine_kept = FindKept(donor.rank), mine_made = FindMade(donor.rank, idlest.rank);
    WriteOffer(0, mine_kept);
    WriteOffer(1, mine_made);
    t_.SyncBlock();
    const Offer kept = BestOffer(0);
    Offer made = BestOffer(1);
    made.tokens = Least(made.tokens, idlest.amount);
    const bool makes =
        made.tokens > kept.tokens && Least(made.tokens, donor.amount) >= static_cast<uint32_t>(call_.min_tokens);
    const uint32_t tokens = Least(makes ? made.tokens : kept.tokens, donor.amount);
    if (tokens == 0) {
      // Not tried again, see greedy.cc.
      Give(donor.rank, donor.amount);
      t_.SyncBlock();  // all have read the offers
      return true;
    }
    const int slot = makes ? plan_.FirstEmpty(idlest.rank) : static_cast<int>(kept.number);
    const int expert = makes ? plan_.first_expert + static_cast<int>(made.number) : static_cast<int>(plan_.slots[slot]);
    const int taker = slot / call_.plan.slots;
    Give(donor.rank, tokens);
    Take(taker, tokens, makes);
    t_.SyncBlock();  // all have read
    if (t_.thread() == 0) {
      if (makes) {
        plan_.slots[slot] = expert;
        plan_.holders[static_cast<int>(made.number) * W + taker / kLanes] |= 1u << (taker % kLanes);
      }
      plan_.quota[expert * plan_.stride + donor.rank] -= static_cast<int32_t>(tokens);
      plan_.quota[expert * plan_.stride + taker] += static_cast<int32_t>(tokens);
      all_room_[taker] -= tokens;
    }
    t_.SyncBlock();
    return true;
  }

  // Of the slots of this thread, the one that can take the most.
  MOE_LB_DEVICE Offer FindKept(int donor) const {
    Offer best = {0, UINT32_MAX};
    for (int slot = t_.thread(); slot < call_.plan.all_slots(); slot += kThreads) {
      const int32_t expert = plan_.slots[slot];
      if (expert < 0) continue;
      const uint32_t room = all_room_[slot / call_.plan.slots];
      const auto served = static_cast<uint32_t>(plan_.quota[expert * plan_.stride + donor]);
      const uint32_t tokens = Least(served, room);
      if (tokens > best.tokens) best = {tokens, static_cast<uint32_t>(slot)};
    }
    return best;
  }

  // Of the experts of this thread, the one of which the donor serves the most and that the rank does not hold.
  MOE_LB_DEVICE Offer FindMade(int donor, int rank) const {
    Offer best = {0, UINT32_MAX};
    for (int expert = t_.thread(); expert < plan_.num_experts && rank >= 0; expert += kThreads) {
      const auto served = static_cast<uint32_t>(plan_.quota[(plan_.first_expert + expert) * plan_.stride + donor]);
      const uint32_t word = plan_.holders[expert * W + rank / kLanes];
      if ((word >> (rank % kLanes) & 1) == 0 && served > best.tokens) best = {served, static_cast<uint32_t>(expert)};
    }
    return best;
  }

  // The best of a warp, the lowest number of equal ones.
  MOE_LB_DEVICE Offer BestOf(const Offer& mine) const {
    const uint32_t tokens = t_.Max(mine.tokens);
    return {tokens, t_.Min(mine.tokens == tokens ? mine.number : UINT32_MAX)};
  }

  MOE_LB_DEVICE void WriteOffer(int kind, const Offer& mine) const {
    const Offer best = BestOf(mine);
    if (t_.lane() != 0) return;
    offers_[(2 * kind) * kWarps + t_.warp()] = best.tokens;
    offers_[(2 * kind + 1) * kWarps + t_.warp()] = best.number;
  }

  // The best of the block, after a barrier.
  MOE_LB_DEVICE Offer BestOffer(int kind) const {
    const int warp = t_.lane() % kWarps;
    return BestOf({offers_[(2 * kind) * kWarps + warp], offers_[(2 * kind + 1) * kWarps + warp]});
  }

  MOE_LB_DEVICE void Give(int rank, uint32_t tokens) {
    for (int k = 0; k < W; ++k) surplus_[k] -= kLanes * k + t_.lane() == rank ? tokens : 0;
  }

  MOE_LB_DEVICE void Take(int rank, uint32_t tokens, bool makes) {
    for (int k = 0; k < W; ++k) {
      if (kLanes * k + t_.lane() != rank) continue;
      room_[k] -= tokens;
      open_[k] -= makes ? 1 : 0;
    }
  }

  MOE_LB_DEVICE void WriteQuota() const {
    const auto result = t_.template Global<int32_t>(call_.plan.new_quota + plan_.first_rank,
                                                    call_.plan.all_amounts() - Size(plan_.first_rank));
    for (int i = t_.thread(); i < call_.plan.all_experts * plan_.num_ranks; i += kThreads) {
      result[i / plan_.num_ranks * call_.plan.all_ranks + i % plan_.num_ranks] = plan_.quota[i];
    }
  }

  const T& t_;
  const GreedyCall& call_;
  const EditedPlan<T, W>& plan_;
  Array<uint32_t> offers_;                         // [4, warps]: tokens and number of slots, then of experts
  Array<uint32_t> all_room_;                       // [ranks]
  uint32_t surplus_[size_t{W}], room_[size_t{W}];  // of the ranks of this lane; surplus 0 once it can give no more
  int open_[size_t{W}];                            // their empty slots
};

}  // namespace moe_lb::device
