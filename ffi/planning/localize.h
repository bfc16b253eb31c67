// Moves replicas to the ranks where their tokens start.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ffi/common/view.h"
#include "ffi/planning/serving.h"

namespace moe_lb {

// Moves replicas with their tokens to another rank with a free slot, or exchanges two, if no rank exceeds the limit and
// more tokens are served on the rank where they start: sum(min(counts, quota)) over ranks and experts, homes not
// counted. One pass over all pairs in order.
//
//   counts: [R, E]. slots: replicas per rank.
void Localize(Serving& serving, MatrixView<const int32_t> counts, int32_t limit, size_t slots);

}  // namespace moe_lb
