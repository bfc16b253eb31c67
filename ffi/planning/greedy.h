// Quotas on replicas: surplus to deficit, one expert at a time.
#pragma once

#include <cstdint>

#include "ffi/common/status.h"
#include "ffi/common/view.h"

namespace moe_lb {

// Moves the surplus of the busiest ranks to idle ones. Domains are planned separately.
//
// A rank's surplus is what its load has above the domain's mean, rounded up; its room what it has
// below. Until no rank of the domain has a surplus, the one with the largest gives tokens away:
//   kept: to the existing slot that can take most tokens of the expert that it holds, or
//   new:  to the first empty slot of the rank with most room among those that have one: it takes, of
//         the experts that have their home in this domain and no slot on that rank, the one that the
//         donor serves most of.
// Either takes no more than its rank has room for. `new` wins if it could take more than `kept` and
// the move reaches min_tokens. No move exceeds the surplus. A donor without a taker is
// skipped. Ties go to the lower rank, slot and expert.
//
//   placement: [R, S], the expert in each slot, -1 for an empty one.
//   quota: [E, R], tokens of each expert that each rank serves, at least 0; their sum must fit int32.
//     Home of expert e is rank e / (E / R).
//   domain: ranks of a domain; divides R.
//   min_tokens: a new replica takes at least so many; at least 1.
//   new_placement, new_quota: the plan after the moves, of the same shapes; may not overlap the operands.
Status Greedy(MatrixView<const int32_t> placement, MatrixView<const int32_t> quota, int64_t domain, int64_t min_tokens,
              MatrixView<int32_t> new_placement, MatrixView<int32_t> new_quota);

}  // namespace moe_lb
