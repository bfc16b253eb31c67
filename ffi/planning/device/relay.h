// `Relay` of ffi/planning as one launch of one block, whose first warp plans the trees. Equal plans.
#pragma once

#include "ffi/planning/device/edit_call.h"
#include "ffi/planning/device/ranks.h"

namespace moe_lb::device {

template <typename T, int W>
class RelayPlanner {
 public:
  static MOE_LB_DEVICE void Run(const T& t, const RelayCall& call, int /*block*/) {
    RelayPlanner planner(t, call);
    if (!planner.Load()) return;
    if (t.warp() == 0) planner.PlanTrees();
    t.SyncBlock();
    const auto relay = t.template Global<int32_t>(call.relay, Size(planner.all_slots_));
    for (int i = t.thread(); i < planner.all_slots_; i += kThreads) relay[i] = planner.relays_[i];
  }

 private:
  template <typename V>
  using Array = typename T::template Array<V>;

  MOE_LB_DEVICE RelayPlanner(const T& t, const RelayCall& call)
      : t_(t), call_(call), num_experts_(call.num_ranks * call.home), all_slots_(call.num_ranks * call.slots) {
    const RelayLayout at = LayOut(call);
    sums_ = t.template Shared<uint64_t>(at.sums, kWarps);
    replicas_ = t.template Shared<uint32_t>(at.replicas, Size(num_experts_) * W);
    experts_ = t.template Shared<int32_t>(at.experts, Size(all_slots_));
    relays_ = t.template Shared<int32_t>(at.relays, Size(all_slots_));
    for (int k = 0; k < W; ++k) sends_[k] = 0;
  }

  // Starts with all replicas copied from home. False: the placement is refused.
  MOE_LB_DEVICE bool Load() {
    for (int i = t_.thread(); i < num_experts_ * W; i += kThreads) replicas_[i] = 0;
    t_.SyncBlock();
    const auto placement = t_.template Global<const int32_t>(call_.placement, Size(all_slots_));
    bool good = true;
    for (int i = t_.thread(); i < all_slots_; i += kThreads) {
      const int rank = i / call_.slots, place = i % call_.slots;
      const int32_t expert = placement[i];
      experts_[i] = expert;
      relays_[i] = place < call_.home ? rank : expert < 0 ? -1 : expert / call_.home;
      if (place < call_.home) good = good && expert == rank * call_.home + place;
      good = good && expert >= -1 && expert < num_experts_;
      if (place < call_.home || expert < 0 || !good) continue;
      const uint32_t bit = 1u << (rank % kLanes);
      const uint32_t before = t_.OrAt(replicas_, expert * W + rank / kLanes, bit);
      // No expert is twice on a rank.
      good = good && expert / call_.home != rank && (before & bit) == 0;
    }
    good = SumOfBlock(t_, sums_, good ? 0 : 1) == 0;
    if (t_.thread() == 0) t_.template Global<int32_t>(call_.status, 1)[0] = good ? 0 : 1;
    return good;
  }

  // ---- Trees, by one warp ----------------------------------------------------------

  MOE_LB_DEVICE void PlanTrees() {
    for (int base = 0; base < num_experts_; base += kLanes) {
      int mine = 0;
      for (int k = 0; k < W && base + t_.lane() < num_experts_; ++k) {
        mine += NumBits(replicas_[(base + t_.lane()) * W + k]);
      }
      for (uint32_t some = t_.Ballot(mine > 0); some != 0; some &= some - 1) {
        const int lane = LowestBit(some);
        PlanTree(base + lane, t_.From(mine, lane));
      }
    }
  }

  // `NumRelays` of relay.cc.
  MOE_LB_DEVICE int NumRelays(int replicas) const {
    if (replicas < call_.options.min_replicas) return 0;
    int root = 0;
    while ((root + 1) * (root + 1) <= replicas) ++root;
    const auto relays = static_cast<int>(Least<int64_t>(Least(root, replicas - 1), call_.options.max_relays));
    const int most = Most(relays, (replicas - 1) / relays);
    return replicas - most >= call_.options.min_gain ? relays : 0;
  }

  MOE_LB_DEVICE void PlanTree(int expert, int number) {
    const int num_relays = NumRelays(number);
    Send(expert / call_.home, static_cast<uint32_t>(num_relays > 0 ? num_relays : number));
    if (num_relays == 0) return;
    Ranks<W> left;
    for (int k = 0; k < W; ++k) left.words[k] = replicas_[expert * W + k];
    const int relay = ChooseRelays(num_relays, &left);
    uint32_t sends = ValueOf<W>(t_, sends_, relay);
    for (int i = 0; i < number - num_relays; ++i) {
      const int rank = left.Lowest();
      left.Drop(rank);
      // Each relay first gets one replica, see relay.cc.
      const uint32_t idle[1] = {t_.lane() < num_relays ? ~sends : 0};
      const int lane = i < num_relays ? i : FindPeak<1>(t_, idle).rank;
      if (t_.lane() == lane) ++sends;
      const int source = t_.From(relay, lane);
      if (t_.lane() == rank % kLanes) Copy(expert, rank, source);
    }
    for (int lane = 0; lane < num_relays; ++lane) {
      const int rank = t_.From(relay, lane);
      const uint32_t its_sends = t_.From(sends, lane);
      for (int k = 0; k < W; ++k) sends_[k] = kLanes * k + t_.lane() == rank ? its_sends : sends_[k];
    }
  }

  // Takes the ranks that send the fewest copies so far out of `left`, then those that relay none, then lower ones.
  // Returns relay i to lane i.
  MOE_LB_DEVICE int ChooseRelays(int num_relays, Ranks<W>* left) {
    int mine = 0;
    const Ranks<W> before = relays_some_;
    for (int i = 0; i < num_relays; ++i) {
      uint32_t idle[size_t{W}];
      for (int k = 0; k < W; ++k) {
        const uint32_t key = 2 * sends_[k] + (before.words[k] >> t_.lane() & 1);
        idle[k] = (left->words[k] >> t_.lane() & 1) != 0 ? ~key : 0;
      }
      const int rank = FindPeak<W>(t_, idle).rank;
      left->Drop(rank);
      relays_some_.Add(rank);
      if (t_.lane() == i) mine = rank;
    }
    return mine;
  }

  MOE_LB_DEVICE void Send(int rank, uint32_t copies) {
    for (int k = 0; k < W; ++k) sends_[k] += kLanes * k + t_.lane() == rank ? copies : 0;
  }

  // Called by one lane, which alone writes to this rank.
  MOE_LB_DEVICE void Copy(int expert, int rank, int source) const {
    for (int i = rank * call_.slots + call_.home; i < (rank + 1) * call_.slots; ++i) {
      if (static_cast<int32_t>(experts_[i]) == expert) relays_[i] = source;
    }
  }

  const T& t_;
  const RelayCall& call_;
  const int num_experts_, all_slots_;
  Array<uint64_t> sums_;       // [warps]
  Array<uint32_t> replicas_;   // [experts, W], ranks with a replica
  Array<int32_t> experts_;     // [ranks, slots]
  Array<int32_t> relays_;      // [ranks, slots], the result
  uint32_t sends_[size_t{W}];  // of the ranks of this lane: copies sent so far
  Ranks<W> relays_some_ = NoRanks<W>();
};

}  // namespace moe_lb::device
