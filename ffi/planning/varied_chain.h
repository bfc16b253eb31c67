// Constructive placement as by `Chain`, in an order of choices varied by noise.
#pragma once

#include <cstdint>
#include <vector>

#include "ffi/planning/serving.h"
#include "ffi/planning/variation.h"

namespace moe_lb {

// Places replicas, starting from none, until no rank is above its goal or no free slot reduces a load.
//
// The rank with the most room, weighted, receives min(tokens, room) of the hottest expert, weighted, of the donor with
// the largest key; in some orders it receives until it is full. A rank above its goal gives, and others receive. The
// goal is below the limit until the rank reaches it, so a rank may make room beforehand. Ties go to the lower rank and
// expert.
class VariedChain {
 public:
  // slots: replicas per rank. fan_out: replicas of the experts of one home rank.
  VariedChain(size_t num_ranks, size_t slots, size_t fan_out);

  void Fill(Serving& serving, int32_t limit, const Variation& variation);

 private:
  void Start(const Serving& serving, int32_t limit, const Variation& variation);
  void Update(const Serving& serving, uint32_t rank, int32_t limit, const Variation& variation);

  size_t slots_;
  size_t fan_out_;
  std::vector<size_t> used_;       // [R], slots
  std::vector<size_t> sent_;       // [R], replicas of its experts
  std::vector<int32_t> goal_;      // [R]
  std::vector<uint32_t> hottest_;  // [R], expert of a donor
  std::vector<uint32_t> room_;     // [R], weighted; 0 for ranks that cannot receive
  std::vector<uint32_t> donates_;  // [R], keys; 0 for ranks that do not give
  std::vector<uint32_t> liking_;   // [E]
  std::vector<uint32_t> welcome_;  // [R]
};

}  // namespace moe_lb
