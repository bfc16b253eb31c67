// A plan that a planner edits, in the shared memory of a block: the checks of ffi/planning/checks.h, and sums of it.
//
// A block plans one domain. It reads the quota of all experts and writes the columns of its own ranks, so that blocks
// write disjoint parts of the result.
#pragma once

#include "ffi/planning/device/edit_call.h"
#include "ffi/planning/device/ranks.h"

namespace moe_lb::device {

// New replicas in the order in which they are made. Experts and ranks are numbered inside the domain.
template <typename T>
struct Moves {
  typename T::template Array<uint32_t> expert_rank;  // expert * 2^16 + rank
  typename T::template Array<int32_t> tokens;

  MOE_LB_DEVICE void Place(const T& t, const EditCall& call, size_t at) {
    tokens = t.template Shared<int32_t>(at, MovesBytes(call) / 8);
    expert_rank = t.template Shared<uint32_t>(at + MovesBytes(call) / 2, MovesBytes(call) / 8);
  }

  // Called by one lane.
  MOE_LB_DEVICE void Set(int i, int expert, int rank, int32_t amount) const {
    expert_rank[i] = static_cast<uint32_t>(expert) << 16 | static_cast<uint32_t>(rank);
    tokens[i] = amount;
  }
};

template <typename T, int W>
class EditedPlan {
 public:
  template <typename V>
  using Array = typename T::template Array<V>;

  MOE_LB_DEVICE EditedPlan(const T& t, const EditCall& call, int domain, const EditLayout& at)
      : home(call.home()),
        num_ranks(call.num_ranks),
        num_experts(call.num_experts()),
        first_rank(domain * call.num_ranks),
        first_expert(domain * call.num_experts()),
        t_(t),
        call_(call) {
    const size_t ranks = Size(num_ranks), experts = Size(num_experts);
    sums_ = t.template Shared<uint64_t>(at.sums, kWarps);
    load = t.template Shared<int32_t>(at.load, ranks);
    served = t.template Shared<int32_t>(at.served, experts);
    holders = t.template Shared<uint32_t>(at.holders, experts * W);
    slots = t.template Shared<int32_t>(at.slots, Size(call.all_slots()));
    quota = t.template Global<int32_t>(call.new_quota + first_rank, call.all_amounts() - Size(first_rank));
  }

  const int home, num_ranks, num_experts;  // of the domain; home: experts of a rank
  const int first_rank, first_expert;
  Array<int32_t> quota;     // [all experts, all ranks], from the first rank of the domain
  Array<int32_t> load;      // [ranks]
  Array<int32_t> served;    // [experts], tokens served at home
  Array<uint32_t> holders;  // [experts, W], ranks with a slot for the expert
  Array<int32_t> slots;     // [ranks, slots], experts numbered over all domains

  // Fills the arrays. False: the plan is refused. A barrier of the block has passed.
  MOE_LB_DEVICE bool Load() {
    for (int i = t_.thread(); i < num_ranks; i += kThreads) load[i] = 0;
    for (int i = t_.thread(); i < num_experts * W; i += kThreads) holders[i] = 0;
    t_.SyncBlock();
    const bool good = ReadSlots();
    const uint64_t sum = SumOfBlock(t_, sums_, ReadQuota(good));
    if (first_rank == 0 && t_.thread() == 0) t_.template Global<int32_t>(call_.status, 1)[0] = sum <= INT32_MAX ? 0 : 1;
    return sum <= INT32_MAX;
  }

  // order [experts]: the experts of each rank, those served most at home first. A barrier of the block must follow.
  MOE_LB_DEVICE void SortByServed(Array<uint16_t> order) const {
    for (int expert = t_.thread(); expert < num_experts; expert += kThreads) {
      const int first = expert / home * home;
      const int32_t tokens = served[expert];
      int place = first;
      for (int other = first; other < first + home; ++other) {
        const int32_t its_tokens = served[other];
        place += its_tokens > tokens || (its_tokens == tokens && other < expert) ? 1 : 0;
      }
      order[place] = static_cast<uint16_t>(expert);
    }
  }

  // Empty slots of the ranks of this lane.
  MOE_LB_DEVICE void CountEmpty(int (&empty)[size_t{W}]) const {
    for (int k = 0; k < W; ++k) {
      const int rank = kLanes * k + t_.lane();
      empty[k] = 0;
      for (int i = 0; i < call_.slots && rank < num_ranks; ++i) {
        empty[k] += static_cast<int32_t>(slots[rank * call_.slots + i]) < 0 ? 1 : 0;
      }
    }
  }

  // Puts new replicas into the first empty slots and moves tokens to them from home; a thread for each rank.
  MOE_LB_DEVICE void Apply(const Moves<T>& moves, int count) const {
    for (int rank = t_.thread(); rank < num_ranks; rank += kThreads) {
      int slot = rank * call_.slots;
      for (int i = 0; i < count; ++i) {
        const uint32_t both = moves.expert_rank[i];
        const int expert = static_cast<int>(both >> 16);
        if (expert / home == rank) quota[(first_expert + expert) * call_.all_ranks + rank] -= moves.tokens[i];
        if (static_cast<int>(both & 0xffff) != rank) continue;
        quota[(first_expert + expert) * call_.all_ranks + rank] += moves.tokens[i];
        while (static_cast<int32_t>(slots[slot]) >= 0) ++slot;
        slots[slot] = first_expert + expert;
      }
    }
  }

  // Writes the placement. A barrier of the block must have passed.
  MOE_LB_DEVICE void WritePlacement() const {
    const auto result =
        t_.template Global<int32_t>(call_.new_placement + first_rank * call_.slots, Size(call_.all_slots()));
    for (int i = t_.thread(); i < call_.all_slots(); i += kThreads) result[i] = slots[i];
  }

 private:
  // False: an expert is out of range or not at home, in any domain.
  MOE_LB_DEVICE bool ReadSlots() const {
    const auto placement = t_.template Global<const int32_t>(call_.placement, Size(call_.all_ranks * call_.slots));
    bool good = true;
    for (int i = t_.thread(); i < call_.all_ranks * call_.slots; i += kThreads) {
      const int rank = i / call_.slots, place = i % call_.slots;
      const int32_t expert = placement[i];
      good = good && expert >= -1 && expert < call_.all_experts;
      good = good && (place >= home || expert == rank * home + place);
      const int own_rank = rank - first_rank;
      if (own_rank < 0 || own_rank >= num_ranks) continue;
      slots[i - first_rank * call_.slots] = expert;
      if (expert < first_expert || expert >= first_expert + num_experts) continue;
      const int own = expert - first_expert;
      t_.OrAt(holders, own * W + own_rank / kLanes, 1u << (own_rank % kLanes));
    }
    return good;
  }

  // Returns the sum of all quotas that this thread reads. Threads read along rows, several rows at once.
  MOE_LB_DEVICE uint64_t ReadQuota(bool good) const {
    const auto given = t_.template Global<const int32_t>(call_.quota, call_.all_amounts());
    const int rows = Most(1, kThreads / call_.all_ranks);
    uint64_t sum = 0;
    for (int i = t_.thread(); i < call_.all_ranks * rows; i += kThreads) {
      const int rank = i % call_.all_ranks, own_rank = rank - first_rank;
      const bool is_own = own_rank >= 0 && own_rank < num_ranks;
      uint32_t tokens = 0;
      for (int expert = i / call_.all_ranks; expert < call_.all_experts; expert += rows) {
        const int32_t amount = given[expert * call_.all_ranks + rank];
        sum += static_cast<uint32_t>(amount);
        good = good && amount >= 0;
        tokens += static_cast<uint32_t>(amount);
        if (!is_own) continue;
        quota[expert * call_.all_ranks + own_rank] = amount;
        if (expert / home == rank) served[expert - first_expert] = amount;
      }
      if (is_own) t_.AddAt(load, own_rank, static_cast<int32_t>(tokens));
    }
    return good ? sum : kTooManyTokens;
  }

  const T& t_;
  const EditCall& call_;
  Array<uint64_t> sums_;  // [warps]
};

}  // namespace moe_lb::device
