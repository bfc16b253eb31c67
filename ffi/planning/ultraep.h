// UltraEP's planner (arXiv 2606.04101): quotas on replicas under a limit on the load of a rank.
#pragma once

#include <cstdint>

#include "ffi/common/status.h"
#include "ffi/common/view.h"

namespace moe_lb {

// Finds a limit tau on the load of a rank, near the mean, under which the surplus of the home ranks
// fits into new replicas, in every domain on its own. What is computed is the planner of the paper's
// released code, whose floor on the size of a replica depends on what is still to be moved; Algorithm 1
// as printed, with min_tokens as a hard floor throughout, ends far from the mean.
//
// The attempt at a limit tau: ranks with a load above tau in the order of their load, and of each of
// them its home experts in the order of what the home serves, give tokens away until no more than tau
// is left. Each time, of the ranks that have a load below tau, an empty slot and no slot for this
// expert, the one furthest below tau takes as much as it can: a new replica. The home keeps one token.
// An expert is left for the next one when the rank that takes most would get less than a floor; the
// attempt fails when a rank runs out of experts. The floor is
//   dynamic: (tokens still to be given) / (ranks that could take some), rounded up, or
//   fixed:   min_tokens.
//
// The search, with low = the domain's mean load, rounded up, and high = its largest load:
// 1. low * (1 + eps), rounded up, and after a failure high / 100, rounded up, more: up to three attempts
//    with the dynamic floor; the first that succeeds is the plan.
// 2. Otherwise the fixed floor: low, then ranges [low, high] cut at four limits into five parts, of which
//    the lowest limit that succeeds becomes high and the one before it, plus 1, low; at a width of 4 or
//    less every limit from low on. The plan is the attempt at the last high; at the largest load it
//    moves nothing. Success is not monotone in tau, so this need not find the least limit.
// The product in 1 is of float32 (but never below low); all else is of integers. Ties go to the lower rank
// and expert.
//
// The plan may hold replicas already. They keep their slots and their quota, which counts in the load of the serving
// rank; only tokens served at home move. A rank whose replicas alone exceed the limit cannot meet it.
//
//   placement: [R, S], the expert in each slot, -1 for an empty one. The first E / R of rank r hold its
//     home experts, r * E / R and up.
//   quota: [E, R], tokens of each expert that each rank serves, at least 0; their sum must fit int32.
//   domain: ranks of a domain; divides R. Only experts that have their home in it are replicated in it.
//   eps: 0 to 1.
//   min_tokens: at least 1.
//   new_placement, new_quota: the plan, of the same shapes; may not overlap the operands. New replicas
//     take the first empty slots of a rank, in the order in which they were made.
Status UltraEp(MatrixView<const int32_t> placement, MatrixView<const int32_t> quota, int64_t domain, float eps,
               int64_t min_tokens, MatrixView<int32_t> new_placement, MatrixView<int32_t> new_quota);

}  // namespace moe_lb
