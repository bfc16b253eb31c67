// Longest processing time first (Graham 1969): whole items into bins.
#pragma once

#include <cstdint>

#include "ffi/common/status.h"
#include "ffi/common/view.h"

namespace moe_lb {

// Puts items, heaviest first, into the bin that is lightest so far and not full. Ties go to the
// lower index, of items and of bins.
//   weights: [N], at least 0; their sum must fit int32.
//   capacity: items that a bin holds; num_bins * capacity must reach N.
//   bins: [N], the bin of each item.
Status Lpt(View<const int32_t> weights, int64_t num_bins, int64_t capacity, View<int32_t> bins);

}  // namespace moe_lb
