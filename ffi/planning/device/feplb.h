// `Feplb` of ffi/planning as one launch: a block for each domain, whose first warp makes the moves. Equal plans.
#pragma once

#include "ffi/planning/device/edit.h"

namespace moe_lb::device {

template <typename T, int W>
class FeplbPlanner {
 public:
  // domain: the number of this block.
  static MOE_LB_DEVICE void Run(const T& t, const FeplbCall& call, int domain) {
    const FeplbLayout at = LayOut(call);
    EditedPlan<T, W> plan(t, call.plan, domain, at.plan);
    if (!plan.Load(true)) return;
    Array<uint16_t> order = t.template Shared<uint16_t>(at.by_served, Size(plan.num_experts));
    Array<int32_t> count = t.template Shared<int32_t>(at.count, 1);
    Moves<T> moves;
    moves.Place(t, call.plan, at.moves);
    plan.SortByServed(order);
    t.SyncBlock();
    if (t.warp() == 0) {
      FeplbPlanner planner(t, call, plan, order, moves);
      while (planner.MoveOne()) {
      }
      if (t.lane() == 0) count[0] = planner.count_;
    }
    t.SyncBlock();
    plan.Apply(moves, count[0]);
    t.SyncBlock();
    plan.WritePlacement();
  }

 private:
  template <typename V>
  using Array = typename T::template Array<V>;

  static constexpr int kMoved = 0xffff;

  MOE_LB_DEVICE FeplbPlanner(const T& t, const FeplbCall& call, const EditedPlan<T, W>& plan, Array<uint16_t> order,
                             const Moves<T>& moves)
      : t_(t), call_(call), plan_(plan), order_(order), moves_(moves) {
    plan.CountEmpty(open_);
    for (int k = 0; k < W; ++k) {
      const int rank = kLanes * k + t.lane();
      load_[k] = rank < plan.num_ranks ? static_cast<uint32_t>(plan.load[rank]) : 0;
      open_[k] = Least(open_[k], call.max_num_dyn);
    }
  }

  MOE_LB_DEVICE bool MoveOne() {
    const Peak donor = FindPeak<W>(t_, load_);
    if (donor.rank < 0) return false;
    const int first = donor.rank * plan_.home, end = first + Least(plan_.home, call_.num_dynamic);
    for (int place = first; place < end; ++place) {
      const int expert = order_[place];
      if (expert == kMoved) continue;
      const int32_t served = plan_.served[expert];
      if (served < call_.tau) break;
      const Peak taker = FindTaker(expert);
      // Of the taker, the amount is the complement of its load.
      if (taker.rank >= 0 && static_cast<uint32_t>(served) < donor.amount - Least(donor.amount, ~taker.amount)) {
        Move(place, expert, donor.rank, taker.rank, served);
        return true;
      }
      if (!call_.skip) break;
    }
    return false;
  }

  // The idlest rank that can take the expert, or -1.
  MOE_LB_DEVICE Peak FindTaker(int expert) const {
    uint32_t amounts[size_t{W}];
    for (int k = 0; k < W; ++k) {
      const bool holds = (static_cast<uint32_t>(plan_.holders[expert * W + k]) >> t_.lane() & 1) != 0;
      amounts[k] = open_[k] > 0 && !holds ? ~load_[k] : 0;
    }
    return FindPeak<W>(t_, amounts);
  }

  MOE_LB_DEVICE void Move(int place, int expert, int donor, int taker, int32_t tokens) {
    for (int k = 0; k < W; ++k) {
      const int rank = kLanes * k + t_.lane();
      if (rank == donor) load_[k] -= static_cast<uint32_t>(tokens);
      if (rank != taker) continue;
      load_[k] += static_cast<uint32_t>(tokens);
      --open_[k];
    }
    t_.SyncWarp();  // all have read the order
    if (t_.lane() == 0) {
      order_[place] = kMoved;
      moves_.Set(count_, expert, taker, tokens);
    }
    t_.SyncWarp();
    ++count_;
  }

  const T& t_;
  const FeplbCall& call_;
  const EditedPlan<T, W>& plan_;
  Array<uint16_t> order_;  // [experts]: those of each rank, most served first; kMoved after a move
  Moves<T> moves_;
  int count_ = 0;
  uint32_t load_[size_t{W}];  // of the ranks of this lane
  int open_[size_t{W}];       // experts that they can still take
};

}  // namespace moe_lb::device
