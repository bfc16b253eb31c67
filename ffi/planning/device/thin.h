// Removes replicas within a limit, by one warp: `Thinning` of ffi/planning.
#pragma once

#include "ffi/planning/device/flow.h"

namespace moe_lb::device {

// Bytes beside the flow: the saved amounts and loads, and the replicas in the order of removal.
MOE_LB_ANYWHERE size_t ThinBytes(const Shape& shape) {
  const size_t all = static_cast<size_t>(shape.all_slots());
  const size_t saved = 4 * (static_cast<size_t>(shape.num_experts + shape.num_ranks) + all);
  return (saved + 2 * all + 7) / 8 * 8;
}

template <typename T, int W>
class Thin {
 public:
  template <typename V>
  using Array = typename T::template Array<V>;

  MOE_LB_DEVICE Thin(const T& t, Flow<T, W>& flow, size_t at)
      : t_(t),
        flow_(flow),
        num_amounts_(flow.shape.num_experts + flow.shape.all_slots()),
        saved_(t.template Shared<int32_t>(at, Size(num_amounts_ + flow.shape.num_ranks))),
        sorted_(t.template Shared<uint16_t>(at + 4 * Size(num_amounts_ + flow.shape.num_ranks),
                                            Size(flow.shape.all_slots()))) {}

  // Returns the number of replicas left.
  MOE_LB_DEVICE int Run(int32_t limit) {
    Sort();
    flow_.FindAllNeighbours(t_);
    Save();
    FindComponents(flow_.AllRanks(), limit);
    Ranks<W> parted = NoRanks<W>();
    int left = flow_.num_entries;
    for (int base = 0; base < flow_.num_entries; base += kLanes) {
      const int i = base + t_.lane();
      const int mine = i < flow_.num_entries ? static_cast<int>(sorted_[i]) : 0;
      // Each lane checks one replica, and the first that may go is tried.
      for (uint32_t done = 0; done != UINT32_MAX;) {
        const auto room = ValueOf<W>(t_, room_, flow_.RankOf(mine));
        const bool may_go = static_cast<int32_t>(flow_.tokens[flow_.shape.num_experts + mine]) <= room;
        const uint32_t found = t_.Ballot(i < flow_.num_entries && may_go) & ~done;
        if (found == 0) break;
        done |= (2u << LowestBit(found)) - 1;
        const int slot = t_.From(mine, LowestBit(found));
        if (Remove(slot, limit)) {
          --left;
          parted.Add(flow_.RankOf(slot));
          parted.Add(flow_.HomeOf(flow_.expert[slot]));
        } else if (parted.Any()) {
          // As in thinning.cc.
          FindComponents(parted, limit);
          parted = NoRanks<W>();
        }
      }
    }
    return left;
  }

 private:
  // By the tokens before any removal, then by the order of addition.
  MOE_LB_DEVICE void Sort() {
    const int count = flow_.num_entries;
    for (int i = t_.lane(); i < count; i += kLanes) {
      saved_[i] = static_cast<int32_t>(flow_.tokens[flow_.shape.num_experts + static_cast<int>(flow_.slot_of[i])]);
    }
    t_.SyncWarp();
    for (int i = t_.lane(); i < count; i += kLanes) {
      const int32_t tokens = saved_[i];
      int place = 0;
      for (int j = 0; j < count; ++j) {
        const int32_t other = saved_[j];
        place += other < tokens || (other == tokens && j < i) ? 1 : 0;
      }
      sorted_[place] = flow_.slot_of[i];
    }
    t_.SyncWarp();
  }

  MOE_LB_DEVICE void FindComponents(const Ranks<W>& ranks, int32_t limit) {
    FindBeside(ranks);
    FindRooms(ranks, limit);
  }

  // The room below the limit of the components of these ranks, with replicas as edges from home; INT32_MAX with a
  // cycle, that is, with as many replicas as ranks. See Thinning::MayGo.
  MOE_LB_DEVICE void FindRooms(Ranks<W> left, int32_t limit) {
    // Rooms are added up in 32 bits. Larger ones exclude no removal, which does not change the plan.
    const bool is_small = static_cast<int64_t>(flow_.shape.num_ranks) * limit <= INT32_MAX;
    while (left.Any()) {
      Ranks<W> component = NoRanks<W>(), now = NoRanks<W>();
      now.Add(left.Lowest());
      while (now.Any()) {
        for (int k = 0; k < W; ++k) component.words[k] |= now.words[k];
        Ranks<W> next;
        for (int w = 0; w < W; ++w) {
          uint32_t mine = 0;
          for (int k = 0; k < W; ++k) mine |= (now.words[k] >> t_.lane() & 1) != 0 ? beside_[k].words[w] : 0;
          next.words[w] = t_.Or(mine) & ~component.words[w];
        }
        now = next;
      }
      uint32_t replicas = 0, room = 0;
      for (int k = 0; k < W; ++k) {
        left.words[k] &= ~component.words[k];
        if ((component.words[k] >> t_.lane() & 1) == 0) continue;
        const int rank = kLanes * k + t_.lane();
        replicas += replicas_[k];
        room += static_cast<uint32_t>(limit - static_cast<int32_t>(flow_.load[rank]));
      }
      const bool is_tree = t_.Sum(replicas) < static_cast<uint32_t>(component.Count());
      room = t_.Sum(room);
      for (int k = 0; k < W; ++k) {
        if ((component.words[k] >> t_.lane() & 1) == 0) continue;
        room_[k] = is_tree && is_small ? static_cast<int32_t>(room) : INT32_MAX;
      }
    }
  }

  MOE_LB_DEVICE void FindBeside(const Ranks<W>& ranks) {
    for (int k = 0; k < W; ++k) {
      if ((ranks.words[k] >> t_.lane() & 1) != 0) FindBeside(k);
    }
  }

  // The ranks with a replica of an expert at home here, the homes of the replicas here, and their number.
  MOE_LB_DEVICE void FindBeside(int k) {
    const int rank = kLanes * k + t_.lane();
    Ranks<W> ranks = NoRanks<W>();
    for (int word = 0; word < flow_.shape.split_words(); ++word) {
      for (uint32_t bits = flow_.split[rank * flow_.shape.split_words() + word]; bits != 0; bits &= bits - 1) {
        const int expert = rank * flow_.shape.home + kLanes * word + LowestBit(bits);
        for (int w = 0; w < W; ++w) ranks.words[w] |= static_cast<uint32_t>(flow_.holders[expert * W + w]);
      }
    }
    const int first = rank * flow_.shape.slots, end = first + static_cast<int>(flow_.used[rank]);
    replicas_[k] = 0;
    for (int slot = first; slot < end; ++slot) {
      if (static_cast<int>(flow_.gone[slot]) != 0) continue;
      ranks.Add(flow_.HomeOf(flow_.expert[slot]));
      ++replicas_[k];
    }
    beside_[k] = ranks;
  }

  MOE_LB_DEVICE void Save() {
    for (int i = t_.lane(); i < num_amounts_; i += kLanes) saved_[i] = flow_.tokens[i];
    for (int r = t_.lane(); r < flow_.shape.num_ranks; r += kLanes) saved_[num_amounts_ + r] = flow_.load[r];
  }

  // Removes one replica if the loads can keep the limit; else leaves all as it was.
  MOE_LB_DEVICE bool Remove(int slot, int32_t limit) {
    const int expert = flow_.expert[slot], rank = flow_.RankOf(slot), home = flow_.HomeOf(expert);
    const int32_t tokens = flow_.tokens[flow_.shape.num_experts + slot];
    const auto before = flow_.neighbours;
    const Ranks<W> holders = flow_.HoldersOf(expert);
    t_.SyncWarp();  // all have read
    if (t_.lane() == 0) flow_.Remove(slot);
    t_.SyncWarp();
    flow_.FindNeighbours(t_, holders);
    // A removal adds load to home alone.
    Ranks<W> reached;
    if (flow_.Offload(t_, home, limit, &reached)) {
      Save();
      return true;
    }
    t_.SyncWarp();  // all have read the loads
    Restore(slot, expert, rank, home, tokens);
    t_.SyncWarp();
    flow_.neighbours = before;
    return false;
  }

  MOE_LB_DEVICE void Restore(int slot, int expert, int rank, int home, int32_t tokens) {
    // Tokens of other replicas change only if the offload pushed some before it failed.
    if (flow_.pushed) {
      for (int i = t_.lane(); i < num_amounts_; i += kLanes) flow_.tokens[i] = saved_[i];
      for (int r = t_.lane(); r < flow_.shape.num_ranks; r += kLanes) flow_.load[r] = saved_[num_amounts_ + r];
    }
    if (t_.lane() != 0) return;
    flow_.gone[slot] = 0;
    flow_.holders[expert * W + rank / kLanes] |= 1u << (rank % kLanes);
    if (flow_.pushed) return;
    flow_.tokens[flow_.shape.num_experts + slot] = tokens;
    flow_.tokens[expert] -= tokens;
    flow_.load[rank] += tokens;
    flow_.load[home] -= tokens;
  }

  const T& t_;
  Flow<T, W>& flow_;
  // Of the ranks of this lane: ranks of their replicas and of replicas of their experts, and replicas.
  Ranks<W> beside_[size_t{W}];
  uint32_t replicas_[size_t{W}] = {};
  int32_t room_[size_t{W}] = {};
  int num_amounts_;
  Array<int32_t> saved_;    // [E + R * slots + R]
  Array<uint16_t> sorted_;  // [R * slots], slots
};

}  // namespace moe_lb::device
