// Tokens of each expert served by each rank, and the flow leveling them over given replicas.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "ffi/common/view.h"

namespace moe_lb {

struct Replica {
  uint32_t expert;
  uint32_t rank;
};

// One entry per serving slot: entry e < E is expert e at its home, later ones are replicas in the order added. Home of
// expert e is rank e / (E / R). No rank may hold an expert twice. The sum of all tokens must fit int32.
class Serving {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;

  // Starts with all tokens served at home. `tokens` [E] must outlive this object.
  Serving(View<const int32_t> tokens, size_t num_ranks);

  // Resets to the initial state, without replicas.
  void Reset();

  size_t num_ranks() const { return load_.size(); }
  size_t num_experts() const { return of_expert_.size(); }
  size_t home_experts() const { return home_experts_; }
  uint32_t num_entries() const { return static_cast<uint32_t>(tokens_.size()); }
  int32_t load(uint32_t rank) const { return load_[rank]; }
  int32_t tokens(uint32_t entry) const { return tokens_[entry]; }
  uint32_t rank(uint32_t entry) const { return entries_[entry].rank; }
  uint32_t expert(uint32_t entry) const { return entries_[entry].expert; }
  bool removed(uint32_t entry) const { return removed_[entry] != 0; }
  size_t num_replicas() const { return num_replicas_; }
  int32_t MaxLoad() const;
  std::vector<Replica> Replicas() const;

  // Returns the most replicas of the experts of one home rank.
  size_t FanOut() const;

  // Returns whether a rank serves an expert, at its home or by a replica.
  bool Holds(uint32_t rank, uint32_t expert) const;

  // Adds a replica and moves `tokens` to it from its expert's home.
  void Add(uint32_t expert, uint32_t rank, int32_t tokens);

  // Moves tokens from the home of a replica's expert to the replica.
  void MoveTokens(uint32_t entry, int32_t tokens);

  // Moves a replica and its tokens to another rank. Do not level, remove or find replicas afterwards.
  void MoveReplica(uint32_t entry, uint32_t to);

  // Removes a replica; its tokens return home.
  void Remove(uint32_t entry);

  // Moves tokens over the replicas until every rank is within the returned limit: `limit`, or the lowest limit possible
  // with these replicas if it is higher.
  //
  // Exact by max-flow and min-cut: from a rank above the limit, tokens are pushed along a shortest path of ranks, each
  // holding an expert served by the rank before it. If no path reaches a rank below the limit, the reached ranks hold
  // every copy of the experts they serve. No quota then has a lower maximum than the mean load of these ranks, rounded
  // up; the limit rises to this value. At `too_high` it ends early: the result is then only a lower bound.
  int32_t Level(int32_t limit, int32_t too_high = std::numeric_limits<int32_t>::max());

  // Moves tokens of `rank` to other ranks until its load is at most the limit; false if impossible. No quota of
  // these replicas then keeps the limit, and moved tokens stay moved. Loads of other ranks do not rise above the limit.
  bool OffloadRank(uint32_t rank, int32_t limit);

  // After OffloadRank failed: the ranks to which tokens of `rank` can move, including itself.
  const std::vector<uint32_t>& reached() const { return queue_; }

  // Returns the replica, not removed, of an expert on a rank with one.
  uint32_t Find(uint32_t expert, uint32_t rank) const;

  // State changed by moves, to undo moves and removals.
  struct Amounts {
    std::vector<int32_t> tokens;
    std::vector<int32_t> load;
  };
  void Save(Amounts* amounts) const;
  void Restore(const Amounts& amounts, uint32_t removed);

 private:
  struct Entry {
    uint32_t rank = 0;
    uint32_t expert = 0;
    // Replicas only, in the order added.
    uint32_t next_of_expert = kNone;
    uint32_t next_of_rank = kNone;
  };

  // Of replicas.
  struct List {
    uint32_t first = kNone;
    uint32_t last = kNone;
  };

  // Of a path to a rank.
  struct Step {
    uint32_t search = 0;  // which reached the rank
    uint32_t taken = 0;   // the entry giving tokens to reach this rank
    uint32_t given = 0;   // the entry on this rank receiving them
  };

  void Link(uint32_t entry);
  bool Visit(uint32_t from, int32_t limit);  // all ranks next to `from`; true: below the limit
  bool Reach(uint32_t from, uint32_t to, int32_t limit);
  void Push(uint32_t source, uint32_t sink, int32_t limit);

  View<const int32_t> all_tokens_;
  size_t home_experts_;
  size_t num_replicas_ = 0;
  std::vector<int32_t> load_;    // [R]
  std::vector<int32_t> tokens_;  // per entry
  std::vector<uint8_t> removed_;
  std::vector<Entry> entries_;   // fields of an entry are read together, so that they share a cache line
  std::vector<List> of_expert_;  // [E]
  std::vector<List> of_rank_;    // [R]

  // Breadth-first search.
  uint32_t search_ = 0;                // its number, so that marks need no clearing
  std::vector<uint32_t> expert_seen_;  // [E]
  std::vector<Step> steps_;            // [R]
  std::vector<uint32_t> queue_;
};

}  // namespace moe_lb
