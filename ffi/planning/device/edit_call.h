// Arguments of the planners of plans and of relays in a block of a GPU, and their shared memory.
#pragma once

#include <cstdint>

#include "ffi/common/view.h"
#include "ffi/planning/device/ranks.h"
#include "ffi/planning/relay.h"
#include "ffi/planning/ultraep.h"

namespace moe_lb::device {

// A plan and its domains. All arrays are in global memory.
struct EditCall {
  const int32_t* placement;  // [all ranks, slots]
  const int32_t* quota;      // [all experts, all ranks]
  int32_t* new_placement;    // the same shapes
  int32_t* new_quota;
  int32_t* status;  // [1]: 0, or 1 for a plan that the planner refuses
  int all_ranks, all_experts, slots;
  int num_ranks;  // of a domain

  MOE_LB_ANYWHERE int home() const { return all_experts / all_ranks; }
  MOE_LB_ANYWHERE int num_experts() const { return home() * num_ranks; }
  MOE_LB_ANYWHERE int all_slots() const { return num_ranks * slots; }
  MOE_LB_ANYWHERE size_t all_amounts() const { return Size(all_experts) * Size(all_ranks); }
  MOE_LB_ANYWHERE size_t words() const { return NumWords(num_ranks); }
};

// A block plans each domain.
struct UltraEpCall {
  EditCall plan;
  UltraEpOptions options;

  MOE_LB_ANYWHERE int blocks() const { return plan.all_ranks / plan.num_ranks; }
  MOE_LB_ANYWHERE size_t words() const { return plan.words(); }
};

// One block plans the relays of all ranks.
struct RelayCall {
  const int32_t* placement;  // [ranks, slots]
  int32_t* relay;            // [ranks, slots]
  int32_t* status;           // [1]
  int num_ranks, home, slots;
  RelayOptions options;

  MOE_LB_ANYWHERE int blocks() const { return 1; }
  MOE_LB_ANYWHERE size_t words() const { return NumWords(num_ranks); }
};

// Offsets in bytes of the arrays of an edited plan.
struct EditLayout {
  size_t sums, load, served, holders, slots;
};

MOE_LB_ANYWHERE EditLayout LayOut(const EditCall& call, Offsets* at) {
  const size_t experts = static_cast<size_t>(call.num_experts());
  EditLayout layout;
  layout.sums = at->Take(8 * kWarps);
  layout.load = at->Take(4 * static_cast<size_t>(call.num_ranks));
  layout.served = at->Take(4 * experts);
  layout.holders = at->Take(4 * experts * call.words());
  layout.slots = at->Take(4 * static_cast<size_t>(call.all_slots()));
  return layout;
}

// New replicas of a domain, at most one for each slot beside those of home experts.
MOE_LB_ANYWHERE size_t MovesBytes(const EditCall& call) {
  return 8 * static_cast<size_t>(call.num_ranks * (call.slots - call.home()));
}

constexpr int kAttempts = 4;           // of UltraEP at once, a warp each
constexpr int kLists = kAttempts + 1;  // and the best so far

struct UltraEpLayout {
  EditLayout plan;
  size_t by_load, by_served, counts, moves, one_moves, end;
};

MOE_LB_ANYWHERE UltraEpLayout LayOut(const UltraEpCall& call) {
  Offsets at;
  UltraEpLayout layout;
  layout.plan = LayOut(call.plan, &at);
  layout.by_load = at.Take(2 * static_cast<size_t>(call.plan.num_ranks));
  layout.by_served = at.Take(2 * static_cast<size_t>(call.plan.num_experts()));
  layout.counts = at.Take(4 * kLists);
  layout.one_moves = MovesBytes(call.plan);
  layout.moves = at.Take(layout.one_moves * kLists);
  layout.end = at.end;
  return layout;
}

struct RelayLayout {
  size_t sums, replicas, experts, relays, end;
};

MOE_LB_ANYWHERE RelayLayout LayOut(const RelayCall& call) {
  const size_t ranks = static_cast<size_t>(call.num_ranks);
  Offsets at;
  RelayLayout layout;
  layout.sums = at.Take(8 * kWarps);
  layout.replicas = at.Take(4 * ranks * static_cast<size_t>(call.home) * call.words());
  layout.experts = at.Take(4 * ranks * static_cast<size_t>(call.slots));
  layout.relays = at.Take(4 * ranks * static_cast<size_t>(call.slots));
  layout.end = at.end;
  return layout;
}

// Whether the domains of a plan fit into a block. Experts of a domain have 16 bits.
inline bool Fits(const EditCall& call) {
  return call.num_ranks <= kMaxRanks && call.num_experts() <= 0xffff && call.slots >= call.home() &&
         HasSmallOffsets(call.all_ranks, call.all_experts, call.slots);
}

// Whether a call fits into a block.
inline bool Fit(const UltraEpCall& call) { return Fits(call.plan) && LayOut(call).end <= kSharedBytes; }

inline bool Fit(const RelayCall& call) {
  // Offsets have 31 bits.
  return call.num_ranks <= kMaxRanks && static_cast<int64_t>(call.num_ranks) * call.slots <= INT32_MAX / 4 &&
         LayOut(call).end <= kSharedBytes;
}

// ---- Calls of arrays ---------------------------------------------------------------

// The shapes of the arrays match, and `domain` divides the ranks.
inline EditCall EditOf(MatrixView<const int32_t> placement, MatrixView<const int32_t> quota, int64_t domain,
                       MatrixView<int32_t> new_placement, MatrixView<int32_t> new_quota, int32_t* status) {
  return {placement.flat().data(),
          quota.flat().data(),
          new_placement.flat().data(),
          new_quota.flat().data(),
          status,
          static_cast<int>(placement.rows()),
          static_cast<int>(quota.rows()),
          static_cast<int>(placement.columns()),
          static_cast<int>(domain)};
}

inline RelayCall RelayOf(MatrixView<const int32_t> placement, const RelayOptions& options, MatrixView<int32_t> relay,
                         int32_t* status) {
  return {placement.flat().data(),
          relay.flat().data(),
          status,
          static_cast<int>(placement.rows()),
          static_cast<int>(options.num_home),
          static_cast<int>(placement.columns()),
          options};
}

}  // namespace moe_lb::device
