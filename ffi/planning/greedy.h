// Quotas on replicas: surplus to deficit, one expert at a time.
#pragma once

#include <cstdint>

#include "ffi/common/fields.h"
#include "ffi/common/status.h"
#include "ffi/common/view.h"

namespace moe_lb {

struct GreedyOptions {
  int64_t domain = 0;      // ranks of a domain; divides R
  int64_t min_tokens = 1;  // minimum tokens of a new replica; at least 1

  static auto Fields() {
    return std::make_tuple(Named("domain", &GreedyOptions::domain), Named("min_tokens", &GreedyOptions::min_tokens));
  }
};

// Moves the surplus of the busiest ranks to idle ones. Domains are planned separately.
//
// The surplus of a rank is its load above the domain's mean, rounded up; its room is the difference below. Until no
// rank of the domain has a surplus, the rank with the largest one (the donor) gives tokens to one of two slots:
//   kept: the existing slot that can take the most tokens of its expert, or
//   new:  the first empty slot of the rank with the most room, among ranks with an empty slot. Its expert is the one
//         that the donor serves most, among experts at home in this domain and without a slot on that rank.
// The tokens are at most the room of the receiver and the surplus of the donor. `new` is chosen if it can take more
// than `kept` and the move reaches min_tokens. A donor without a taker is skipped. Ties go to the lower rank, slot and
// expert.
//
//   placement: [R, S], the expert in each slot, -1 for an empty one.
//   quota: [E, R], tokens of each expert served by each rank, at least 0; their sum must fit int32.
//     Home of expert e is rank e / (E / R).
//   new_placement, new_quota: the plan after the moves, of the same shapes; may not overlap the operands.
Status Greedy(MatrixView<const int32_t> placement, MatrixView<const int32_t> quota, const GreedyOptions& options,
              MatrixView<int32_t> new_placement, MatrixView<int32_t> new_quota);

}  // namespace moe_lb
