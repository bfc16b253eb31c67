// Moves replicas to the ranks where their tokens start, by one warp: `Localize` of ffi/planning.
#pragma once

#include "ffi/planning/device/flow.h"

namespace moe_lb::device {

MOE_LB_ANYWHERE size_t ReplicasBytes(const Shape& shape) { return static_cast<size_t>(shape.all_slots()) * 8; }

// The replicas of a plan in the order of addition.
template <typename T>
struct Replicas {
  typename T::template Array<uint16_t> expert;  // [R * slots]
  typename T::template Array<uint16_t> rank;    // [R * slots]
  typename T::template Array<int32_t> tokens;   // [R * slots]
  int count = 0;                                // the same on all lanes

  MOE_LB_DEVICE void Place(const T& t, const Shape& shape, size_t at) {
    const size_t all = static_cast<size_t>(shape.all_slots());
    tokens = t.template Shared<int32_t>(at, all);
    expert = t.template Shared<uint16_t>(at + 4 * all, all);
    rank = t.template Shared<uint16_t>(at + 6 * all, all);
  }

  // Lists the replicas of a flow that were not removed. A barrier must follow.
  template <int W>
  MOE_LB_DEVICE void List(const T& t, const Flow<T, W>& flow) {
    count = 0;
    for (int base = 0; base < flow.num_entries; base += kLanes) {
      const int i = base + t.lane();
      const int slot = i < flow.num_entries ? static_cast<int>(flow.slot_of[i]) : 0;
      const bool is_there = i < flow.num_entries && static_cast<int>(flow.gone[slot]) == 0;
      const uint32_t there = t.Ballot(is_there);
      if (is_there) {
        const int place = count + NumBits(there & ((1u << t.lane()) - 1));
        expert[place] = flow.expert[slot];
        rank[place] = static_cast<uint16_t>(flow.RankOf(slot));
        tokens[place] = flow.tokens[flow.shape.num_experts + slot];
      }
      count += NumBits(there);
    }
  }
};

// Tokens of each expert starting on each rank of the domain: counts [R, E] with `stride` experts a row.
template <typename T>
struct Starts {
  typename T::template Array<const int32_t> counts;
  int stride;

  MOE_LB_DEVICE int32_t Of(int rank, int expert) const { return counts[rank * stride + expert]; }
};

// Lanes try successive moves at once with the state before all of them. The first possible one is made, and the later
// ones are tried again with the new state, as if one after the other.
template <typename T, int W>
class Localizer {
 public:
  MOE_LB_DEVICE Localizer(const T& t, Flow<T, W>& flow, Replicas<T>& replicas, const Starts<T>& starts, int32_t limit)
      : t_(t), flow_(flow), replicas_(replicas), starts_(starts), limit_(limit) {}

  // Expects the replicas after a barrier, and changes their ranks. Loads and holders of the flow follow.
  MOE_LB_DEVICE void Run() {
    Count();
    FindRoom();
    for (int i = 0; i < replicas_.count; ++i) {
      for (int from = 0; from < flow_.shape.num_ranks;) from = TryMoves(i, from);
      for (int from = i + 1; from < replicas_.count;) from = TryExchanges(i, from);
    }
  }

 private:
  MOE_LB_DEVICE void Count() {
    for (int k = 0; k < W; ++k) {
      const int rank = kLanes * k + t_.lane();
      used_[k] = 0;
      for (int i = 0; i < replicas_.count; ++i) used_[k] += static_cast<int>(replicas_.rank[i]) == rank ? 1 : 0;
    }
  }

  MOE_LB_DEVICE void FindRoom() {
    int32_t room = 0;
    for (int k = 0; k < W; ++k) {
      const int rank = kLanes * k + t_.lane();
      if (rank < flow_.shape.num_ranks) room = Most(room, limit_ - static_cast<int32_t>(flow_.load[rank]));
    }
    room_ = static_cast<int32_t>(t_.Max(static_cast<uint32_t>(room)));
  }

  MOE_LB_DEVICE bool Fits(int rank, int32_t more) const {
    return static_cast<int32_t>(flow_.load[rank]) + more <= limit_;
  }

  MOE_LB_DEVICE bool Holds(int rank, int expert) const {
    return (static_cast<uint32_t>(flow_.holders[expert * W + rank / kLanes]) >> (rank % kLanes) & 1) != 0;
  }

  // Tokens served where they start on `to` beyond those on `from`.
  MOE_LB_DEVICE int32_t Gain(int expert, int32_t tokens, int from, int to) const {
    return Least(starts_.Of(to, expert), tokens) - Least(starts_.Of(from, expert), tokens);
  }

  // Moves replica i to the first possible rank from `from` on; returns the rank behind it, or the end.
  MOE_LB_DEVICE int TryMoves(int i, int from) {
    const int end = flow_.shape.num_ranks;
    const int32_t tokens = replicas_.tokens[i];
    if (tokens > room_) return end;
    const int expert = replicas_.expert[i], rank = replicas_.rank[i];
    Ranks<W> able;
    for (int k = 0; k < W; ++k) {
      const int to = kLanes * k + t_.lane();
      const bool may = to >= from && to < end && used_[k] < flow_.shape.slots && Fits(to, tokens) &&
                       !Holds(to, expert) && Gain(expert, tokens, rank, to) > 0;
      able.words[k] = t_.Ballot(may);
    }
    const int to = able.Lowest();
    if (to < 0) return end;
    for (int k = 0; k < W; ++k) used_[k] += (kLanes * k + t_.lane() == to) - (kLanes * k + t_.lane() == rank);
    t_.SyncWarp();  // all have read
    if (t_.lane() == 0) Move(i, expert, tokens, rank, to);
    t_.SyncWarp();
    FindRoom();
    return to + 1;
  }

  // Exchanges replica i with the first possible one of the next 32 from `from` on; returns the first not tried.
  MOE_LB_DEVICE int TryExchanges(int i, int from) {
    const int other = from + t_.lane();
    const int expert = replicas_.expert[i], rank = replicas_.rank[i];
    const int32_t tokens = replicas_.tokens[i];
    const uint32_t able = t_.Ballot(other < replicas_.count && MayExchange(expert, rank, tokens, other));
    if (able == 0) return from + kLanes;
    const int j = from + LowestBit(able);
    const int its_expert = replicas_.expert[j], its_rank = replicas_.rank[j];
    const int32_t its_tokens = replicas_.tokens[j];
    t_.SyncWarp();  // all have read
    if (t_.lane() == 0) {
      Move(i, expert, tokens, rank, its_rank);
      Move(j, its_expert, its_tokens, its_rank, rank);
    }
    t_.SyncWarp();
    FindRoom();
    return j + 1;
  }

  MOE_LB_DEVICE bool MayExchange(int expert, int rank, int32_t tokens, int other) const {
    const int32_t its_tokens = replicas_.tokens[other], more = its_tokens - tokens;
    if (more > room_ || -more > room_) return false;
    const int its_expert = replicas_.expert[other], its_rank = replicas_.rank[other];
    if (!Fits(rank, more) || !Fits(its_rank, -more)) return false;
    if (Holds(its_rank, expert) || Holds(rank, its_expert)) return false;
    // Of 64 bits, because each is at most 2^31.
    return static_cast<int64_t>(Gain(expert, tokens, rank, its_rank)) + Gain(its_expert, its_tokens, its_rank, rank) >
           0;
  }

  MOE_LB_DEVICE void Move(int i, int expert, int32_t tokens, int from, int to) {
    replicas_.rank[i] = static_cast<uint16_t>(to);
    flow_.load[from] -= tokens;
    flow_.load[to] += tokens;
    flow_.holders[expert * W + from / kLanes] &= ~(1u << (from % kLanes));
    flow_.holders[expert * W + to / kLanes] |= 1u << (to % kLanes);
  }

  const T& t_;
  Flow<T, W>& flow_;
  Replicas<T>& replicas_;
  const Starts<T>& starts_;
  int32_t limit_;
  int32_t room_ = 0;
  int used_[size_t{W}];
};

}  // namespace moe_lb::device
