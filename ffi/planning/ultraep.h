// UltraEP's planner (arXiv 2606.04101): quotas on replicas under a limit on the load of a rank.
#pragma once

#include <cstdint>

#include "ffi/common/fields.h"
#include "ffi/common/status.h"
#include "ffi/common/view.h"

namespace moe_lb {

struct UltraEpOptions {
  int64_t domain = 0;         // ranks of a domain; divides R. Only experts at home in a domain are replicated in it
  float eps = 0.01f;          // 0 to 1
  int64_t min_tokens = 1024;  // at least 1

  static auto Fields() {
    return std::make_tuple(Named("domain", &UltraEpOptions::domain), Named("eps", &UltraEpOptions::eps),
                           Named("min_tokens", &UltraEpOptions::min_tokens));
  }
};

Status CheckOptions(const UltraEpOptions& options);

// Finds a limit tau on the load of a rank, near the mean, under which the surplus of the home ranks fits into new
// replicas, in every domain separately. This is the planner of the paper's released code, whose minimum size of a
// replica (the floor) depends on the remaining surplus. Algorithm 1 as printed, with min_tokens as a hard floor
// throughout, ends far from the mean.
//
// An attempt at a limit tau: ranks with a load above tau, highest load first, give tokens away until tau is left. Each
// gives tokens of its home experts, in the order of the tokens served at home, most first. The taker is the rank
// furthest below tau, among those with an empty slot and no slot for this expert. It gets a new replica with as many
// tokens as it can take. The home keeps one token. If the taker would get less than the floor, the donor continues with
// its next expert. The attempt fails if a donor runs out of experts. The floor is
//   dynamic: (tokens still to be given) / (ranks that could take some), rounded up, or
//   fixed:   min_tokens.
//
// The search, with low = the domain's mean load, rounded up, and high = its largest load:
// 1. Up to three attempts with the dynamic floor, first at low * (1 + eps), rounded up, then each time at a limit
//    higher by high / 100, rounded up. The plan is the first success.
// 2. Otherwise attempts with the fixed floor. If low fails, four limits cut the range [low, high] into five parts. The
//    lowest successful limit becomes high, and the one before it, plus 1, becomes low. At a width of 4 or less, every
//    limit from low on is tried. The plan is the attempt at the last high; at the largest load it moves no tokens.
//    Success is not monotone in tau, so the limit may be above the minimum.
// The product in 1 is computed in float32 (but never below low), the rest in integers. Ties go to the lower rank and
// expert.
//
// The plan may hold replicas already. They keep their slots and their quota, which counts in the load of the serving
// rank; only tokens served at home move. A rank whose replicas alone exceed the limit cannot meet it.
//
//   placement: [R, S], the expert in each slot, -1 for an empty one. The first E / R of rank r hold its
//     home experts, r * E / R and up.
//   quota: [E, R], tokens of each expert served by each rank, at least 0; their sum must fit int32.
//   new_placement, new_quota: the plan, of the same shapes; may not overlap the operands. New replicas
//     take the first empty slots of a rank, in the order in which they were made.
Status UltraEp(MatrixView<const int32_t> placement, MatrixView<const int32_t> quota, const UltraEpOptions& options,
               MatrixView<int32_t> new_placement, MatrixView<int32_t> new_quota);

}  // namespace moe_lb
