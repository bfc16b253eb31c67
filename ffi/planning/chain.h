// A constructive placement: every replica fills its receiver, even beyond what its giver has to lose.
#pragma once

#include <cstdint>
#include <vector>

#include "ffi/planning/serving.h"

namespace moe_lb {

// Which of the ranks above the limit gives, always its hottest expert. `room` is what the receiver
// can take, `hottest` what is left at home of that expert, `surplus` what the rank has above the limit.
enum class Giver {
  kSurplus,  // most surplus among those with hottest >= room; if there are none, most hottest
  kUseful,   // most min(hottest, surplus, room), then most hottest
  kHottest,  // most hottest
  kInTurn,   // most load at the start, until it has no surplus; gives its surplus at most
};

// Places replicas, starting from none, until no rank is above the limit or no slot can help.
//
// The rank with most room among those with a free slot receives min(hottest, room) tokens of a
// giver's hottest expert. That may be more than the giver's surplus: it then has room itself, and
// becomes a receiver with slots of its own. So every piece closes its receiver for good, or takes an
// expert whole, and the slots of all ranks serve. Ties go to the lower rank and expert.
class Chain {
 public:
  // slots: replicas per rank. fan_out: replicas of the experts of one home rank.
  Chain(size_t num_ranks, size_t slots, size_t fan_out)
      : slots_(slots), fan_out_(fan_out), used_(num_ranks), sent_(num_ranks), start_(num_ranks), hottest_(num_ranks) {}

  void Fill(Serving& serving, int32_t limit, Giver rule);

 private:
  struct Room {
    int32_t tokens;
    uint32_t rank;
    bool operator<(const Room& other) const {
      return tokens != other.tokens ? tokens < other.tokens : rank > other.rank;
    }
  };

  void Start(const Serving& serving, int32_t limit);
  void AddRoom(int32_t tokens, uint32_t rank);
  template <typename Key>
  uint32_t Most(Key key) const;
  uint32_t PickGiver(const Serving& serving, int32_t limit, int32_t room, Giver rule) const;
  void Give(Serving& serving, int32_t limit, uint32_t giver, Room receiver, Giver rule);

  size_t slots_;
  size_t fan_out_;
  std::vector<size_t> used_;       // [R], slots
  std::vector<size_t> sent_;       // [R], replicas
  std::vector<int32_t> start_;     // [R], load at the start, of ranks in givers_
  std::vector<uint32_t> hottest_;  // [R], of ranks in givers_
  std::vector<uint32_t> givers_;   // ascending
  std::vector<Room> rooms_;        // heap
};

}  // namespace moe_lb
