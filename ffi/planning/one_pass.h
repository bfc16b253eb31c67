// The rule of `Greedy` and the first attempt of `UltraEp` as placements of `Exact`.
#pragma once

#include <cstdint>
#include <vector>

#include "ffi/planning/serving.h"

namespace moe_lb {

// Limit of UltraEP's first attempt: its default eps is 0.01, in float32 as in ultraep.cc.
constexpr float kUltraEpRise = 1.0f + 0.01f;

// Fills a `Serving` that starts without replicas with the plans of the two planners. `Exact` starts from these too, so
// its maximum is never above theirs. With a limited fan-out, ranks at the limit make no more replicas.
class OnePass {
 public:
  // slots: replicas per rank. fan_out: replicas of the experts of one home rank.
  OnePass(size_t num_ranks, size_t slots, size_t fan_out);

  // The moves of greedy.h with the default options. mean: of the loads, rounded up.
  void FillGreedy(Serving& serving, int32_t mean);

  // The first attempt of ultraep.h, with the dynamic floor. If the surplus does not fit, some of it stays at home.
  void FillUltraEp(Serving& serving, int32_t mean);

 private:
  // A move of a donor's tokens; none by default.
  struct Offer {
    uint32_t expert = 0;
    uint32_t entry = 0;  // existing replica
    uint32_t rank = 0;   // of a new replica
    int32_t tokens = 0;
  };

  void Start(Serving& serving, int32_t limit);
  void DonateFrom(Serving& serving, uint32_t donor);
  Offer BestReplica(const Serving& serving, uint32_t donor) const;
  Offer BestNew(const Serving& serving, uint32_t donor) const;
  bool Give(Serving& serving, uint32_t donor, int32_t limit);
  void Make(Serving& serving, const Offer& offer);

  size_t slots_;
  size_t fan_out_;
  std::vector<size_t> used_;         // [R], slots
  std::vector<size_t> sent_;         // [R], replicas of its experts
  std::vector<int32_t> surplus_;     // [R], 0 once it can give no more
  std::vector<int32_t> room_;        // [R]
  std::vector<uint32_t> by_load_;    // [R], highest load first
  std::vector<uint32_t> by_tokens_;  // [L], experts of a donor, most tokens first
  std::vector<uint32_t> place_;      // slot of each replica, by its entry, among all
};

}  // namespace moe_lb
