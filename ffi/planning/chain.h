// Constructive placement: every replica fills its receiver, even beyond the donor's surplus.
#pragma once

#include <cstdint>
#include <vector>

#include "ffi/planning/serving.h"

namespace moe_lb {

// Rule for the choice of the donor among the ranks above the limit. A donor gives tokens of its hottest expert. `room`
// is the number of tokens that the receiver can take, `hottest` the tokens of this expert left at home, and `surplus`
// the load of the rank above the limit.
enum class DonorRule {
  kSurplus,     // largest surplus among ranks with hottest >= room; if there are none, largest hottest
  kUseful,      // largest min(hottest, surplus, room), then largest hottest
  kHottest,     // largest hottest
  kSequential,  // highest initial load, until it has no surplus; gives at most its surplus
};

// Places replicas, starting from none, until no rank is above the limit or no free slot reduces a load.
//
// The rank with the most room among ranks with a free slot receives min(hottest, room) tokens of a donor's hottest
// expert. If this exceeds the donor's surplus, the donor then has room itself, and becomes a receiver with slots of its
// own. So every replica fills its receiver or takes a whole expert, and the slots of all ranks are used. Ties go to the
// lower rank and expert.
class Chain {
 public:
  // slots: replicas per rank. fan_out: replicas of the experts of one home rank.
  Chain(size_t num_ranks, size_t slots, size_t fan_out) : slots_(slots), fan_out_(fan_out), used_(num_ranks) {
    donors_.reserve(num_ranks);
    rooms_.reserve(num_ranks);
  }

  void Fill(Serving& serving, int32_t limit, DonorRule rule);

 private:
  // Room of a rank in one number, so that a comparison of a heap has no branch: more tokens first, then the lower rank.
  struct Room {
    uint64_t key;

    Room(int32_t tokens, uint32_t rank) : key(static_cast<uint64_t>(tokens) << 32 | (UINT32_MAX - rank)) {}
    int32_t tokens() const { return static_cast<int32_t>(key >> 32); }
    uint32_t rank() const { return UINT32_MAX - static_cast<uint32_t>(key); }
    bool operator<(const Room& other) const { return key < other.key; }
  };

  // A rank above the limit.
  struct Donor {
    uint32_t rank;
    uint32_t expert;  // the hottest
    int32_t hottest;  // its tokens left at home
    int32_t surplus;
    int32_t start;  // load at the start
    size_t sent;    // replicas
  };

  void Start(const Serving& serving, int32_t limit);
  void AddRoom(int32_t tokens, uint32_t rank);
  template <typename Key>
  Donor* Most(Key key);
  Donor* PickDonor(int32_t room, DonorRule rule);
  void Give(Serving& serving, Donor* donor, Room receiver, DonorRule rule);

  size_t slots_;
  size_t fan_out_;
  std::vector<size_t> used_;   // [R], slots
  std::vector<Donor> donors_;  // ascending by rank; what a choice reads is in one array
  std::vector<Room> rooms_;    // heap
};

}  // namespace moe_lb
