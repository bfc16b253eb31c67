// Replicas and quotas with the lowest maximum rank load possible with the slots, then with the fewest replicas.
#pragma once

#include <cstdint>
#include <limits>

#include "ffi/common/status.h"
#include "ffi/common/view.h"

namespace moe_lb {

struct ExactOptions {
  // The second step may raise the maximum load by this fraction to save replicas. At least 0.
  double eps = 0;

  // Maximum number of replicas of the experts of one home rank, which sends their weights. At least 0.
  int64_t max_fan_out = std::numeric_limits<int64_t>::max();

  // [R, E], tokens of each expert starting on each rank; columns sum to `tokens` at most, to less if some start
  // outside of the domain. Without rows: unknown. If known, replicas change places if this keeps the maximum and
  // serves more tokens on the rank where they start.
  MatrixView<const int32_t> counts = {nullptr, 0, 0};

  // If true, the first step has fewer parts: for a plan under a limit of replicas, compared with others by time.
  bool brief = false;

  // If true, the caller has checked the values of `counts`.
  bool counts_are_checked = false;
};

Status CheckOptions(const ExactOptions& options);

// Plans one domain from the tokens of its experts.
//
// 1. Best maximum. Placements are made by these steps, each levelled by `Serving::Level`, until one is within 1/4096 of
//    the mean load. `best` is the maximum of the best placement found.
//    - `Chain` under the mean, by three rules.
//    - `OnePass`: the rule of `Greedy` and the first attempt of `UltraEp`. It runs also if a rule is close to the mean,
//      but above it, so that with eps = 0 and no fan-out no plan of these two is more level.
//    - `Chain` under limits above the mean, by bisection.
//    - `VariedChain` in orders of choices varied by noise.
//    - `Search` from the best of them, with a fixed number of steps.
//    A brief plan leaves out limits and variations, and has fewer steps of `Search`.
// 2. Fewest replicas. The candidates are this placement and those of `Chain` under the limit
//    best + floor(eps * best), each reduced by `Thinning` and levelled again to the lowest maximum of its replicas. No
//    candidate has a maximum above the limit. Chosen is the one with the fewest replicas, then with the lowest maximum,
//    then with the fewest replicas sent by one rank.
// 3. With counts, `Localize` within this maximum.
//
// Optimality:
// - For the replicas of the plan, no quota has a lower maximum.
// - A maximum equal to the mean, rounded up, is optimal. This is usual for real loads with two replica slots on each of
//   32 or more ranks.
// - Otherwise the placement is the result of a search and carries no guarantee; docs/results/exact.md compares it with
//   the optimum of a mixed-integer program. Above kMaxSearchedRanks ranks the last step is left out.
// - The number of replicas is minimal only in one respect: removing any single replica would exceed the limit.
//
// The plan is a function of the arguments alone: no clock, fixed pseudo-random seed, ties to the lowest
// index. Home of expert e is rank e / L, with L = E / R.
//
//   tokens: [E], at least 0; their sum must fit int32. E is a positive multiple of R.
//   placement: [R, S], L <= S <= E. Each rank's home experts, then its replicas, then -1. No expert is
//     twice on a rank.
//   quota: [E, R], tokens of each expert served by each rank; rows sum to `tokens`, 0 if the rank
//     has no slot for the expert. Every replica serves at least one token.
Status Exact(View<const int32_t> tokens, const ExactOptions& options, MatrixView<int32_t> placement,
             MatrixView<int32_t> quota);

}  // namespace moe_lb
