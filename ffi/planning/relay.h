// Relays (UltraEP, arXiv 2606.04101): replicas forwarding the weights of an expert with many replicas.
#pragma once

#include <cstdint>

#include "ffi/common/fields.h"
#include "ffi/common/status.h"
#include "ffi/common/view.h"

namespace moe_lb {

struct RelayOptions {
  int64_t num_home = 0;      // home experts of a rank; the first slots
  int64_t min_replicas = 4;  // experts with fewer replicas are copied from home; at least 2
  int64_t max_relays = 8;    // of one expert; at least 1
  int64_t min_gain = 2;      // copies by which the busiest sender of a tree must be below home alone; at least 1

  static auto Fields() {
    return std::make_tuple(Named("num_home", &RelayOptions::num_home),
                           Named("min_replicas", &RelayOptions::min_replicas),
                           Named("max_relays", &RelayOptions::max_relays), Named("min_gain", &RelayOptions::min_gain));
  }
};

Status CheckOptions(const RelayOptions& options);

// Builds trees of two levels, expert by expert in order, by the copies sent by each rank so far. All copies have equal
// size.
//
// An expert with n replicas gets k = min(floor(sqrt(n)), max_relays, n - 1) relays if n >= min_replicas and
// n - max(k, ceil((n - k) / k)) >= min_gain; otherwise all of them copy from home, which then sends n more. The
// relays are the k ranks with replicas that send the fewest copies so far; ties go to ranks that relay no expert yet,
// then to lower ranks. They copy from home, which sends k more. The other replicas copy from relays, lower ranks first:
// the first k from one relay each, in the order of the relays, the rest from the relay with the fewest copies at that
// point. Ties go to the first relay in that order.
//
//   placement: [R, S], the expert in each slot, -1 for an empty one, none twice on a rank. The first num_home slots of
//     rank r hold its home experts, r * num_home and up.
//   relay: [R, S], the rank from which the slot copies; its own rank for a home expert, -1 for an empty slot.
Status Relay(MatrixView<const int32_t> placement, const RelayOptions& options, MatrixView<int32_t> relay);

}  // namespace moe_lb
