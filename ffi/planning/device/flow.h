// Tokens of each expert served by each rank, and the flow leveling them, by one warp: `Serving` of ffi/planning.
//
// A lane stands for the ranks lane, lane + 32 and so on. The search for a path is by levels of sets of ranks, and finds
// the path of the search of `Serving` in the order of its queue: see Path.
#pragma once

#include "ffi/planning/device/ranks.h"

namespace moe_lb::device {

// The sizes of one domain.
struct Shape {
  int num_ranks, num_experts, home, slots;  // experts and replica slots of a rank

  MOE_LB_ANYWHERE int all_slots() const { return num_ranks * slots; }
  MOE_LB_ANYWHERE size_t all_amounts() const { return Size(num_experts) * Size(num_ranks); }
  MOE_LB_ANYWHERE size_t words() const { return NumWords(num_ranks); }
  MOE_LB_ANYWHERE int split_words() const { return (home + kLanes - 1) / kLanes; }
};

// Bytes of the arrays of a flow with sets of ranks of this many words.
MOE_LB_ANYWHERE size_t FlowBytes(const Shape& shape, size_t words) {
  const size_t ranks = static_cast<size_t>(shape.num_ranks), all = static_cast<size_t>(shape.all_slots());
  const size_t experts = static_cast<size_t>(shape.num_experts);
  const size_t large = ranks + experts + all + experts * words + ranks * static_cast<size_t>(shape.split_words());
  return (4 * large + 2 * (3 * all + 3 * ranks) + all + 7) / 8 * 8;
}

// An amount of tokens is at home (number e < E for expert e) or in a replica slot (number E + rank * slots + place).
// Replicas of a rank are in its slots in the order of their addition.
template <typename T, int W>
class Flow {
 public:
  template <typename V>
  using Array = typename T::template Array<V>;

  Shape shape;
  int num_entries = 0;      // replicas added so far, the same on all lanes
  Array<int32_t> load;      // [R]
  Array<int32_t> tokens;    // [E + R * slots]
  Array<uint32_t> holders;  // [E, W], ranks holding the expert
  Array<uint32_t> split;    // [R, split_words], home experts that had a replica
  Array<uint16_t> expert;   // [R * slots]
  Array<uint16_t> order;    // [R * slots], number of the replica in the order of addition
  Array<uint16_t> slot_of;  // [R * slots], slot of the replica of a number
  Array<uint8_t> gone;      // [R * slots], 1 for slots without a replica
  Array<uint16_t> used;     // [R], slots used so far, the removed included
  Array<uint16_t> taken;    // [R], the path: amounts giving tokens
  Array<uint16_t> given;    // [R], and those receiving them
  bool pushed = false;      // an offload moved tokens

  // its_shape: with slots. at: start of the arrays in the shared memory of the block, FlowBytes long. Arrays of large
  // elements come first.
  MOE_LB_DEVICE void Place(const T& t, const Shape& its_shape, size_t at) {
    shape = its_shape;
    by_slots_ = Divisor(shape.slots);
    by_home_ = Divisor(shape.home);
    const size_t ranks = static_cast<size_t>(shape.num_ranks), all = static_cast<size_t>(shape.all_slots());
    const size_t experts = static_cast<size_t>(shape.num_experts);
    const size_t splits = ranks * static_cast<size_t>(shape.split_words());
    load = t.template Shared<int32_t>(at, ranks);
    tokens = t.template Shared<int32_t>(at += 4 * ranks, experts + all);
    holders = t.template Shared<uint32_t>(at += 4 * (experts + all), experts * W);
    split = t.template Shared<uint32_t>(at += 4 * experts * W, splits);
    expert = t.template Shared<uint16_t>(at += 4 * splits, all);
    order = t.template Shared<uint16_t>(at += 2 * all, all);
    slot_of = t.template Shared<uint16_t>(at += 2 * all, all);
    taken = t.template Shared<uint16_t>(at += 2 * all, ranks);
    given = t.template Shared<uint16_t>(at += 2 * ranks, ranks);
    used = t.template Shared<uint16_t>(at += 2 * ranks, ranks);
    gone = t.template Shared<uint8_t>(at += 2 * ranks, all);
  }

  MOE_LB_DEVICE int RankOf(int slot) const { return by_slots_.Quotient(slot); }
  MOE_LB_DEVICE int HomeOf(int of_expert) const { return by_home_.Quotient(of_expert); }
  MOE_LB_DEVICE int ExpertOf(int amount) const {
    return amount < shape.num_experts ? amount : static_cast<int>(expert[amount - shape.num_experts]);
  }

  // Starts with all tokens at home. A barrier of the warp must follow.
  MOE_LB_DEVICE void Reset(const T& t, Array<int32_t> home_tokens, Array<int32_t> home_load) {
    num_entries = 0;
    for (int e = t.lane(); e < shape.num_experts; e += kLanes) {
      tokens[e] = home_tokens[e];
      const int home = HomeOf(e);
      for (int w = 0; w < W; ++w) holders[e * W + w] = home / kLanes == w ? 1u << (home % kLanes) : 0u;
    }
    for (int r = t.lane(); r < shape.num_ranks; r += kLanes) {
      load[r] = home_load[r];
      used[r] = 0;
      for (int w = 0; w < shape.split_words(); ++w) split[r * shape.split_words() + w] = 0;
    }
  }

  // Adds a replica to the next slot of a rank; its tokens leave the home. Called by one lane.
  MOE_LB_DEVICE void Append(int of_expert, int rank, int32_t amount) {
    const int slot = rank * shape.slots + static_cast<int>(used[rank]);
    used[rank] += 1;
    PutNext(of_expert, slot, amount);
    load[rank] += amount;
    load[HomeOf(of_expert)] -= amount;
  }

  // The same by all lanes of a warp that keep the loads and used slots of their ranks in registers, see `Write`.
  MOE_LB_DEVICE void Record(const T& t, int of_expert, int rank, int used_slots, int32_t amount) {
    if (t.lane() == 0) PutNext(of_expert, rank * shape.slots + used_slots, amount);
    ++num_entries;
  }

  // Writes the loads and used slots of the ranks of each lane, and ends with a barrier of the warp.
  MOE_LB_DEVICE void Write(const T& t, const int32_t (&loads)[size_t{W}], const int (&used_slots)[size_t{W}]) {
    for (int k = 0; k < W; ++k) {
      const int rank = kLanes * k + t.lane();
      if (rank >= shape.num_ranks) continue;
      load[rank] = loads[k];
      used[rank] = static_cast<uint16_t>(used_slots[k]);
    }
    t.SyncWarp();
  }

  // Puts a replica into a slot, as the next in order.
  MOE_LB_DEVICE void PutNext(int of_expert, int slot, int32_t amount) {
    slot_of[num_entries] = static_cast<uint16_t>(slot);
    order[slot] = static_cast<uint16_t>(num_entries);
    Put(of_expert, slot, amount);
  }

  // The same without the order.
  MOE_LB_DEVICE void Put(int of_expert, int slot, int32_t amount) {
    const int rank = RankOf(slot), home = HomeOf(of_expert), place = of_expert - home * shape.home;
    expert[slot] = static_cast<uint16_t>(of_expert);
    gone[slot] = 0;
    tokens[shape.num_experts + slot] = amount;
    tokens[of_expert] -= amount;
    holders[of_expert * W + rank / kLanes] |= 1u << (rank % kLanes);
    split[home * shape.split_words() + place / kLanes] |= 1u << (place % kLanes);
  }

  // Empties a slot; its tokens return home. Called by one lane.
  MOE_LB_DEVICE void Remove(int slot) {
    const int of_expert = expert[slot], rank = RankOf(slot), home = HomeOf(of_expert);
    const int32_t amount = tokens[shape.num_experts + slot];
    tokens[shape.num_experts + slot] = 0;
    tokens[of_expert] += amount;
    load[rank] -= amount;
    load[home] += amount;
    gone[slot] = 1;
    holders[of_expert * W + rank / kLanes] &= ~(1u << (rank % kLanes));
  }

  MOE_LB_DEVICE Ranks<W> HoldersOf(int of_expert) const {
    Ranks<W> ranks;
    for (int w = 0; w < W; ++w) ranks.words[w] = holders[of_expert * W + w];
    return ranks;
  }

  // Ranks next to each rank of this lane: those holding an expert that it serves.
  struct Neighbours {
    Ranks<W> of[size_t{W}];
  };

  MOE_LB_DEVICE void FindNeighbours(const T& t, const Ranks<W>& ranks) {
    for (int k = 0; k < W; ++k) {
      if ((ranks.words[k] >> t.lane() & 1) == 0) continue;
      const int rank = kLanes * k + t.lane();
      Ranks<W> next = NoRanks<W>();
      for (int word = 0; word < shape.split_words(); ++word) {
        // Tokens of experts without replicas cannot move.
        for (uint32_t bits = split[rank * shape.split_words() + word]; bits != 0; bits &= bits - 1) {
          AddHolders(&next, rank * shape.home + kLanes * word + LowestBit(bits));
        }
      }
      const int first = shape.num_experts + rank * shape.slots;
      const int end = first + static_cast<int>(used[rank]);
      for (int amount = first; amount < end; ++amount) AddHolders(&next, amount);
      neighbours.of[k] = next;
    }
  }

  MOE_LB_DEVICE Ranks<W> AllRanks() const {
    Ranks<W> all;
    for (int k = 0; k < W; ++k) {
      const int left = shape.num_ranks - kLanes * k;
      all.words[k] = left >= kLanes ? 0xffffffffu : left > 0 ? (1u << left) - 1 : 0;
    }
    return all;
  }

  MOE_LB_DEVICE void FindAllNeighbours(const T& t) { FindNeighbours(t, AllRanks()); }

  // `Serving::FanOut`.
  MOE_LB_DEVICE int FanOut(const T& t) const {
    uint32_t most = 0;
    for (int rank = t.lane(); rank < shape.num_ranks; rank += kLanes) {
      uint32_t sent = 0;
      for (int word = 0; word < shape.split_words(); ++word) {
        for (uint32_t bits = split[rank * shape.split_words() + word]; bits != 0; bits &= bits - 1) {
          const int of_expert = rank * shape.home + kLanes * word + LowestBit(bits);
          for (int w = 0; w < W; ++w) sent += static_cast<uint32_t>(NumBits(holders[of_expert * W + w]));
          --sent;  // the home
        }
      }
      most = Most(most, sent);
    }
    return static_cast<int>(t.Max(most));
  }

  // `Serving::Level`.
  MOE_LB_DEVICE int32_t Level(const T& t, int32_t limit, int32_t too_high = INT32_MAX) {
    FindAllNeighbours(t);
    for (;;) {
      const int rank = Loaded(t, limit).Lowest();
      if (rank < 0 || limit >= too_high) return limit;
      Ranks<W> reached;
      if (Offload(t, rank, limit, &reached)) continue;
      uint32_t mine = 0;
      for (int k = 0; k < W; ++k) {
        if ((reached.words[k] >> t.lane() & 1) != 0) mine += static_cast<uint32_t>(load[kLanes * k + t.lane()]);
      }
      const auto count = static_cast<uint32_t>(reached.Count());
      limit = static_cast<int32_t>((t.Sum(mine) + count - 1) / count);
    }
  }

  // Ranks with a load above the limit.
  MOE_LB_DEVICE Ranks<W> Loaded(const T& t, int32_t limit) const {
    Ranks<W> above;
    for (int k = 0; k < W; ++k) {
      const int rank = kLanes * k + t.lane();
      above.words[k] = t.Ballot(rank<shape.num_ranks&& static_cast<int32_t>(load[rank])> limit);
    }
    return above;
  }

  // `Serving::OffloadRank`; `reached` is set if it fails. Needs the neighbours of all ranks and keeps them.
  MOE_LB_DEVICE bool Offload(const T& t, int rank, int32_t limit, Ranks<W>* reached) {
    pushed = false;
    for (int32_t over = load[rank] - limit; over > 0; over = load[rank] - limit) {
      Path path;
      if (!Search(t, rank, limit, &path, reached)) return false;
      Push(t, rank, over, limit, path);
      pushed = true;
    }
    return true;
  }

  Neighbours neighbours;

 private:
  Divisor by_slots_, by_home_;

  // Level of each rank of this lane, -1 if not reached, and whether a path to a rank with room leads through it.
  struct Path {
    int length;
    int level[size_t{W}];
    bool leads[size_t{W}];
  };

  MOE_LB_DEVICE void AddHolders(Ranks<W>* ranks, int amount) const {
    if (static_cast<int32_t>(tokens[amount]) == 0) return;
    const int of_expert = ExpertOf(amount);
    for (int w = 0; w < W; ++w) ranks->words[w] |= static_cast<uint32_t>(holders[of_expert * W + w]);
  }

  // Searches the shortest paths from a rank to one below the limit. False: there is none.
  MOE_LB_DEVICE bool Search(const T& t, int source, int32_t limit, Path* path, Ranks<W>* reached) const {
    Ranks<W> room;
    for (int k = 0; k < W; ++k) {
      const int rank = kLanes * k + t.lane();
      room.words[k] = t.Ballot(rank < shape.num_ranks && static_cast<int32_t>(load[rank]) < limit);
      path->level[k] = rank == source ? 0 : -1;
    }
    Ranks<W> now = NoRanks<W>(), hit = NoRanks<W>();
    now.Add(source);
    *reached = now;
    for (path->length = 1;; ++path->length) {
      Ranks<W> next;
      for (int w = 0; w < W; ++w) {
        uint32_t mine = 0;
        for (int k = 0; k < W; ++k) {
          mine |= (now.words[k] >> t.lane() & 1) != 0 ? neighbours.of[k].words[w] : 0;
        }
        next.words[w] = t.Or(mine) & ~reached->words[w];
      }
      if (!next.Any()) return false;
      for (int k = 0; k < W; ++k) {
        if ((next.words[k] >> t.lane() & 1) != 0) path->level[k] = path->length;
        reached->words[k] |= next.words[k];
        hit.words[k] = next.words[k] & room.words[k];
      }
      now = next;
      if (hit.Any()) break;
    }
    Lead(t, hit, path);
    return true;
  }

  // Marks the ranks through which a path of this length leads to `targets`, from the last level back.
  MOE_LB_DEVICE void Lead(const T& t, Ranks<W> targets, Path* path) const {
    for (int k = 0; k < W; ++k) path->leads[k] = (targets.words[k] >> t.lane() & 1) != 0;
    for (int level = path->length - 1; level > 0; --level) {
      Ranks<W> before;
      for (int k = 0; k < W; ++k) {
        uint32_t meets = 0;
        for (int w = 0; w < W; ++w) meets |= neighbours.of[k].words[w] & targets.words[w];
        if (path->level[k] == level) path->leads[k] = meets != 0;
        before.words[k] = t.Ballot(path->level[k] == level && path->leads[k]);
      }
      targets = before;
    }
  }

  // Pushes tokens along the path that the queue of `Serving` finds. Of the ranks of a level through which a path leads,
  // let the first be the one reached first. A rank is reached from the earliest rank of the level before that is next
  // to it. So the first rank of a level is reached from the first rank of the level before, by its first amount with a
  // holder among these ranks, and, of these holders, is the home or the one added first.
  MOE_LB_DEVICE void Push(const T& t, int source, int32_t most, int32_t limit, const Path& path) {
    int rank = source;
    Ranks<W> visited = NoRanks<W>();
    visited.Add(source);
    for (int level = 1; level <= path.length; ++level) {
      Ranks<W> targets;
      for (int k = 0; k < W; ++k) targets.words[k] = t.Ballot(path.level[k] == level && path.leads[k]);
      const int from = FirstServing(t, rank, targets);
      const int to = FirstHolder(t, ExpertOf(from), targets);
      rank = to < shape.num_experts ? HomeOf(to) : RankOf(to - shape.num_experts);
      most = Least(most, static_cast<int32_t>(tokens[from]));
      visited.Add(rank);
      if (t.lane() == 0) {
        taken[level - 1] = static_cast<uint16_t>(from);
        given[level - 1] = static_cast<uint16_t>(to);
      }
    }
    most = Least(most, limit - static_cast<int32_t>(load[rank]));
    t.SyncWarp();  // the path is written, and all amounts are read
    for (int i = t.lane(); i < path.length; i += kLanes) {
      tokens[taken[i]] -= most;
      tokens[given[i]] += most;
    }
    if (t.lane() == 0) {
      load[source] -= most;
      load[rank] += most;
    }
    t.SyncWarp();
    FindNeighbours(t, visited);
  }

  // The first amount of a rank whose expert has a holder among the targets: homes in order, then replicas.
  MOE_LB_DEVICE int FirstServing(const T& t, int rank, const Ranks<W>& targets) const {
    for (int base = 0; base < shape.home; base += kLanes) {
      const int place = base + t.lane();
      const uint32_t found = t.Ballot(place < shape.home && Serves(rank * shape.home + place, targets));
      if (found != 0) return rank * shape.home + base + LowestBit(found);
    }
    const int in_use = used[rank], first = shape.num_experts + rank * shape.slots;
    for (int base = 0; base < in_use; base += kLanes) {
      const int place = base + t.lane();
      const uint32_t found = t.Ballot(place < in_use && Serves(first + place, targets));
      if (found != 0) return first + base + LowestBit(found);
    }
    return first;  // not reached: the rank is next to a target
  }

  MOE_LB_DEVICE bool Serves(int amount, const Ranks<W>& targets) const {
    Ranks<W> held = NoRanks<W>();
    AddHolders(&held, amount);
    uint32_t meets = 0;
    for (int w = 0; w < W; ++w) meets |= held.words[w] & targets.words[w];
    return meets != 0;
  }

  // The amount of an expert on the target where it is at home or, else, was added first.
  MOE_LB_DEVICE int FirstHolder(const T& t, int of_expert, const Ranks<W>& targets) const {
    if (targets.Has(HomeOf(of_expert))) return of_expert;
    uint32_t first = UINT32_MAX;
    for (int k = 0; k < W; ++k) {
      const int rank = kLanes * k + t.lane();
      const uint32_t held = targets.words[k] & static_cast<uint32_t>(holders[of_expert * W + k]);
      if ((held >> t.lane() & 1) == 0) continue;
      const int slot = Find(of_expert, rank);
      // Numbers are below 2^16.
      first = Least(first, static_cast<uint32_t>(order[slot]) << 16 | static_cast<uint32_t>(slot));
    }
    return shape.num_experts + static_cast<int>(t.Min(first) & 0xffff);
  }

  MOE_LB_DEVICE int Find(int of_expert, int rank) const {
    int slot = rank * shape.slots;
    while (static_cast<int>(expert[slot]) != of_expert || static_cast<int>(gone[slot]) != 0) ++slot;
    return slot;
  }
};

}  // namespace moe_lb::device
