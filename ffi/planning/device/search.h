// Search over placements by one warp: `Search` of ffi/planning and its two evaluators.
//
// All results of an evaluator are the same for every flow of a placement, so that the flow here may differ from that of
// `FlowEvaluator`.
#pragma once

#include "ffi/planning/device/flow.h"
#include "ffi/planning/search.h"
#include "ffi/planning/subset_evaluator.h"

namespace moe_lb::device {

constexpr int kNoExpert = 0xffff;

// A slot of a rank loses the expert `dropped`, if any, and gets `added`.
struct SlotSwap {
  int rank, slot, dropped, added;
};

// SubsetEvaluator: lane i has the sets i, i + 32 and so on.
template <typename T, int W>
class Subsets {
 public:
  static constexpr int kSets = 1 << SubsetEvaluator::kMaxRanks, kMine = kSets / kLanes;

  // holders: of the search, changed by it after Commit.
  MOE_LB_DEVICE Subsets(const T& t, const Flow<T, W>& flow, typename T::template Array<int32_t> tokens,
                        typename T::template Array<uint32_t> holders)
      : t_(t), tokens_(tokens), holders_(holders), num_sets_(1 << flow.shape.num_ranks) {
    // For sm_100; nvcc unrolls it for other architectures by itself.
    MOE_LB_UNROLL
    for (int i = 0; i < kMine; ++i) {
      const int set = i * kLanes + t.lane();
      excess_[i] = INT32_MIN / 2;
      if (set == 0 || set >= num_sets_) continue;
      excess_[i] = 0;
      for (int e = 0; e < flow.shape.num_experts; ++e) {
        if ((set >> flow.HomeOf(e) & 1) != 0) excess_[i] += static_cast<int32_t>(tokens_[e]);
      }
    }
    FindCut();
  }

  MOE_LB_DEVICE bool Keeps(const SlotSwap& swap, int32_t threshold) const {
    const Change change = Of(swap);
    bool keeps = true;
    for (int i = 0; i < kMine; ++i) keeps = keeps && change.At(i * kLanes + t_.lane(), excess_[i]) <= threshold;
    return t_.Ballot(!keeps) == 0;
  }

  MOE_LB_DEVICE void Commit(const SlotSwap& swap) {
    Place(swap);
    FindCut();
  }

  MOE_LB_DEVICE void Place(const SlotSwap& swap) {
    const Change change = Of(swap);
    for (int i = 0; i < kMine; ++i) excess_[i] = change.At(i * kLanes + t_.lane(), excess_[i]);
  }

  MOE_LB_DEVICE void SetLimit(int32_t limit) {
    for (int i = 0; i < kMine; ++i) {
      const int set = i * kLanes + t_.lane();
      if (set < num_sets_) excess_[i] += NumBits(static_cast<uint32_t>(set)) * (limit_ - limit);
    }
    limit_ = limit;
    FindCut();
  }

  MOE_LB_DEVICE int32_t MaxLoad() const {
    int32_t highest = 0;
    for (int i = 0; i < kMine; ++i) {
      const int set = i * kLanes + t_.lane();
      if (set == 0 || set >= num_sets_) continue;
      const int32_t size = NumBits(static_cast<uint32_t>(set));
      highest = Most(highest, (excess_[i] + size * limit_ + size - 1) / size);
    }
    return static_cast<int32_t>(t_.Max(static_cast<uint32_t>(highest)));
  }

  int32_t worst = 0;
  Ranks<W> cut = NoRanks<W>();

 private:
  struct Change {
    int dropped, back, added, gone;
    int32_t more, less;

    MOE_LB_DEVICE int32_t At(int set, int32_t excess) const {
      return excess + ((set & back) == dropped ? more : 0) - ((set & gone) == added ? less : 0);
    }
  };

  MOE_LB_DEVICE Change Of(const SlotSwap& swap) const {
    const int bit = 1 << swap.rank;
    Change change = {0, bit, static_cast<int>(static_cast<uint32_t>(holders_[swap.added * W])), 0, 0, 0};
    change.less = tokens_[swap.added];
    change.gone = change.added | bit;
    if (swap.dropped == kNoExpert) return change;
    change.dropped = static_cast<int>(static_cast<uint32_t>(holders_[swap.dropped * W])) & ~bit;
    change.more = tokens_[swap.dropped];
    change.back = change.dropped | bit;
    return change;
  }

  // The lowest of the sets with the largest excess.
  MOE_LB_DEVICE void FindCut() {
    int32_t most = 0;
    for (int i = 0; i < kMine; ++i) most = Most(most, excess_[i]);
    worst = static_cast<int32_t>(t_.Max(static_cast<uint32_t>(most)));
    if (worst == 0) return;
    uint32_t lowest = UINT32_MAX;
    for (int i = kMine - 1; i >= 0; --i) {
      if (excess_[i] == worst) lowest = static_cast<uint32_t>(i * kLanes + t_.lane());
    }
    cut = NoRanks<W>();
    cut.words[0] = t_.Min(lowest);
  }

  const T& t_;
  typename T::template Array<int32_t> tokens_;
  typename T::template Array<uint32_t> holders_;
  int num_sets_;
  int32_t excess_[kMine];
  int32_t limit_ = 0;
};

// FlowEvaluator on one flow: a refused swap is undone in it.
template <typename T, int W>
class FlowSwaps {
 public:
  // flow: after Reset. mean: rounded up.
  MOE_LB_DEVICE FlowSwaps(const T& t, Flow<T, W>& flow, int32_t mean) : t_(t), flow_(flow), mean_(mean) {
    for (int r = t.lane(); r < flow.shape.num_ranks; r += kLanes)
      flow.used[r] = static_cast<uint16_t>(flow.shape.slots);
    for (int i = t.lane(); i < flow.shape.all_slots(); i += kLanes) {
      flow.gone[i] = 1;
      flow.tokens[flow.shape.num_experts + i] = 0;
      flow.expert[i] = 0;
      flow.order[i] = static_cast<uint16_t>(i);
    }
    t.SyncWarp();
  }

  MOE_LB_DEVICE bool Keeps(const SlotSwap& swap, int32_t threshold) {
    Apply(swap.slot, swap.dropped, swap.added);
    Ranks<W> stuck = NoRanks<W>();
    const bool keeps = Offload(threshold, &stuck) <= threshold;
    Apply(swap.slot, swap.added, swap.dropped);
    return keeps;
  }

  MOE_LB_DEVICE void Commit(const SlotSwap& swap) {
    Apply(swap.slot, swap.dropped, swap.added);
    FindCut();
  }

  // MaxLoad must follow: it finds the neighbours.
  MOE_LB_DEVICE void Place(const SlotSwap& swap) {
    if (t_.lane() == 0) flow_.Put(swap.added, swap.slot, 0);
  }

  MOE_LB_DEVICE void SetLimit(int32_t limit) {
    limit_ = limit;
    FindCut();
  }

  MOE_LB_DEVICE int32_t MaxLoad() { return flow_.Level(t_, mean_); }

  int32_t worst = 0;
  Ranks<W> cut = NoRanks<W>();

 private:
  MOE_LB_DEVICE void Apply(int slot, int dropped, int added) {
    t_.SyncWarp();  // all have read
    if (t_.lane() == 0) {
      if (dropped != kNoExpert) flow_.Remove(slot);
      if (added != kNoExpert) flow_.Put(added, slot, 0);
    }
    t_.SyncWarp();
    flow_.FindAllNeighbours(t_);
  }

  // `FlowEvaluator::Offload`.
  MOE_LB_DEVICE int64_t Offload(int64_t enough, Ranks<W>* stuck) {
    int64_t excess = 0;
    // No other rank gets above the limit.
    Ranks<W> loaded = flow_.Loaded(t_, limit_), reached;
    for (int rank = loaded.Lowest(); rank >= 0 && excess <= enough; rank = loaded.Lowest()) {
      loaded.Drop(rank);
      if (!stuck->Has(rank)) {
        if (flow_.Offload(t_, rank, limit_, &reached)) continue;
        for (int k = 0; k < W; ++k) stuck->words[k] |= reached.words[k];
      }
      excess += static_cast<int32_t>(flow_.load[rank]) - limit_;
    }
    return excess;
  }

  MOE_LB_DEVICE void FindCut() {
    Ranks<W> stuck = NoRanks<W>();
    worst = static_cast<int32_t>(Offload(INT64_MAX, &stuck));
    if (worst > 0) cut = stuck;
  }

  const T& t_;
  Flow<T, W>& flow_;
  int32_t mean_;
  int32_t limit_ = 0;
};

MOE_LB_ANYWHERE size_t SearchBytes(const Shape& shape, size_t words) {
  const size_t experts = static_cast<size_t>(shape.num_experts), all = static_cast<size_t>(shape.all_slots());
  return (experts * (8 + 4 * words + 2) + 4 * all + 2 * static_cast<size_t>(shape.num_ranks) + 7) / 8 * 8;
}

// The state of a search in shared memory.
template <typename T, int W>
struct SearchMemory {
  typename T::template Array<int32_t> tokens;      // [E], scaled
  typename T::template Array<int32_t> hot_tokens;  // [E], of by_tokens
  typename T::template Array<uint32_t> holders;    // [E, W]
  typename T::template Array<uint16_t> by_tokens;  // [E], each rank's experts, hottest first
  typename T::template Array<uint16_t> slot;       // [R * slots], experts or kNoExpert
  typename T::template Array<uint16_t> best;       // [R * slots], the best found
  typename T::template Array<uint16_t> sent;       // [R], replicas of its experts

  MOE_LB_DEVICE void Place(const T& t, const Shape& shape, size_t at) {
    const size_t experts = static_cast<size_t>(shape.num_experts), all = static_cast<size_t>(shape.all_slots());
    tokens = t.template Shared<int32_t>(at, experts);
    hot_tokens = t.template Shared<int32_t>(at += 4 * experts, experts);
    holders = t.template Shared<uint32_t>(at += 4 * experts, experts * W);
    by_tokens = t.template Shared<uint16_t>(at += 4 * W * experts, experts);
    slot = t.template Shared<uint16_t>(at += 2 * experts, all);
    best = t.template Shared<uint16_t>(at += 2 * all, all);
    sent = t.template Shared<uint16_t>(at += 2 * all, Size(shape.num_ranks));
  }
};

template <typename T, int W>
class Searcher {
 public:
  MOE_LB_DEVICE Searcher(const T& t, const Shape& shape, const SearchMemory<T, W>& memory, int32_t fan_out)
      : t_(t), shape_(shape), m_(memory), fan_out_(fan_out) {}

  // Tokens of the search are home_tokens >> shift. Ends with a barrier.
  MOE_LB_DEVICE void Start(typename T::template Array<int32_t> home_tokens, int shift) {
    for (int e = t_.lane(); e < shape_.num_experts; e += kLanes) {
      m_.tokens[e] = static_cast<int32_t>(home_tokens[e]) >> shift;
      const int home = e / shape_.home;
      for (int w = 0; w < W; ++w) m_.holders[e * W + w] = home / kLanes == w ? 1u << (home % kLanes) : 0u;
    }
    for (int i = t_.lane(); i < shape_.all_slots(); i += kLanes) m_.slot[i] = kNoExpert;
    for (int r = t_.lane(); r < shape_.num_ranks; r += kLanes) m_.sent[r] = 0;
    t_.SyncWarp();
    for (int e = t_.lane(); e < shape_.num_experts; e += kLanes) {
      const int first = e / shape_.home * shape_.home;
      const int32_t tokens = m_.tokens[e];
      int place = first;
      for (int other = first; other < first + shape_.home; ++other) {
        const int32_t its = m_.tokens[other];
        place += its > tokens || (its == tokens && other < e) ? 1 : 0;
      }
      m_.by_tokens[place] = static_cast<uint16_t>(e);
      m_.hot_tokens[place] = tokens;
    }
    t_.SyncWarp();
  }

  // Searches from the replicas of `start`. The result is `best` of the memory, after a barrier.
  template <typename Evaluator>
  MOE_LB_DEVICE void Run(Evaluator& evaluator, const Flow<T, W>& start, int32_t enough, Effort effort) {
    Begin(evaluator, start);
    KeepBest(evaluator);
    FindSides(evaluator);
    const int64_t top = best_ / effort.margin;
    for (int64_t left = effort.steps; left > 0 && best_ > enough && outside_.Any(); --left) {
      const auto level = static_cast<int32_t>(top * left / effort.steps * left / effort.steps);
      SlotSwap swap;
      if (!Propose(evaluator, &swap) || !evaluator.Keeps(swap, Most(level, evaluator.worst))) continue;
      Apply(evaluator, swap);
      if (evaluator.worst == 0) KeepBest(evaluator);
      FindSides(evaluator);
    }
  }

 private:
  template <typename Evaluator>
  MOE_LB_DEVICE void Begin(Evaluator& evaluator, const Flow<T, W>& start) {
    for (int i = 0; i < start.num_entries; ++i) {
      const int taken = start.slot_of[i];
      const SlotSwap swap = {start.RankOf(taken), FirstEmpty(start.RankOf(taken)), kNoExpert, start.expert[taken]};
      evaluator.Place(swap);
      Record(swap);
    }
  }

  // The first empty slot of a rank, or -1.
  MOE_LB_DEVICE int FirstEmpty(int rank) const {
    for (int base = 0; base < shape_.slots; base += kLanes) {
      const int place = base + t_.lane(), slot = rank * shape_.slots + place;
      const uint32_t empty = t_.Ballot(place < shape_.slots && static_cast<int>(m_.slot[slot]) == kNoExpert);
      if (empty != 0) return rank * shape_.slots + base + LowestBit(empty);
    }
    return -1;
  }

  template <typename Evaluator>
  MOE_LB_DEVICE void KeepBest(Evaluator& evaluator) {
    best_ = evaluator.MaxLoad();
    evaluator.SetLimit(best_ - 1);
    for (int i = t_.lane(); i < shape_.all_slots(); i += kLanes) m_.best[i] = m_.slot[i];
  }

  MOE_LB_DEVICE int Draw(int count) {
    random_ = random_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<int>(((random_ >> 32) * static_cast<uint32_t>(count)) >> 32);
  }

  MOE_LB_DEVICE int DrawRank(const Ranks<W>& ranks) {
    int left = Draw(ranks.Count());
    for (int k = 0; k < W; ++k) {
      const int count = NumBits(ranks.words[k]);
      if (left >= count) {
        left -= count;
        continue;
      }
      uint32_t word = ranks.words[k];
      while (left-- > 0) word &= word - 1;
      return kLanes * k + LowestBit(word);
    }
    return 0;
  }

  template <typename Evaluator>
  MOE_LB_DEVICE void FindSides(const Evaluator& evaluator) {
    const Shape& shape = shape_;
    for (int k = 0; k < W; ++k) {
      const int left = shape.num_ranks - kLanes * k;
      const uint32_t all = left >= kLanes ? 0xffffffffu : left > 0 ? (1u << left) - 1 : 0;
      inside_.words[k] = evaluator.cut.words[k] & all;
      outside_.words[k] = ~evaluator.cut.words[k] & all;
    }
  }

  // True if a rank outside of the cut other than `but` holds the expert.
  MOE_LB_DEVICE bool IsHeldOutside(int expert, int but) const {
    Ranks<W> left = outside_;
    uint32_t held = 0;
    for (int k = 0; k < W; ++k) {
      if (but >= 0 && but / kLanes == k) left.words[k] &= ~(1u << (but % kLanes));
      held |= static_cast<uint32_t>(m_.holders[expert * W + k]) & left.words[k];
    }
    return held != 0;
  }

  template <typename Evaluator>
  MOE_LB_DEVICE bool Propose(const Evaluator&, SlotSwap* swap) {
    swap->rank = DrawRank(outside_);
    swap->slot = FirstEmpty(swap->rank);
    if (swap->slot < 0) swap->slot = swap->rank * shape_.slots + Draw(shape_.slots);
    swap->dropped = m_.slot[swap->slot];
    int32_t falls_back = 0;
    if (swap->dropped != kNoExpert && !IsHeldOutside(swap->dropped, swap->rank)) falls_back = m_.tokens[swap->dropped];
    swap->added = DrawExpert(falls_back);
    if (swap->added == kNoExpert) return false;
    const int home = swap->added / shape_.home;
    const bool same_home = swap->dropped != kNoExpert && swap->dropped / shape_.home == home;
    return static_cast<int32_t>(m_.sent[home]) < fan_out_ || same_home;
  }

  MOE_LB_DEVICE int DrawExpert(int32_t more_than) {
    for (int draw = 0; draw < 3; ++draw) {
      const int first = DrawRank(inside_) * shape_.home;
      int hotter = 0;
      for (int base = 0; base < shape_.home; base += kLanes) {
        const int place = base + t_.lane();
        hotter += NumBits(t_.Ballot(place<shape_.home&& static_cast<int32_t>(m_.hot_tokens[first + place])> more_than));
      }
      if (hotter == 0) continue;
      const int expert = m_.by_tokens[first + Draw(hotter)];
      if (!IsHeldOutside(expert, -1)) return expert;
    }
    return kNoExpert;
  }

  template <typename Evaluator>
  MOE_LB_DEVICE void Apply(Evaluator& evaluator, const SlotSwap& swap) {
    evaluator.Commit(swap);
    Record(swap);
  }

  MOE_LB_DEVICE void Record(const SlotSwap& swap) {
    t_.SyncWarp();  // all have read
    if (t_.lane() == 0) {
      const uint32_t bit = 1u << (swap.rank % kLanes);
      m_.slot[swap.slot] = static_cast<uint16_t>(swap.added);
      if (swap.dropped != kNoExpert) {
        m_.holders[swap.dropped * W + swap.rank / kLanes] &= ~bit;
        m_.sent[swap.dropped / shape_.home] -= 1;
      }
      m_.holders[swap.added * W + swap.rank / kLanes] |= bit;
      m_.sent[swap.added / shape_.home] += 1;
    }
    t_.SyncWarp();
  }

  const T& t_;
  const Shape& shape_;
  SearchMemory<T, W> m_;
  int32_t fan_out_;
  Ranks<W> inside_ = NoRanks<W>(), outside_ = NoRanks<W>();
  int32_t best_ = 0;
  uint64_t random_ = 1;
};

}  // namespace moe_lb::device
