// The kernels of planners run by fibers on the CPU.
#pragma once

#include <cstdint>

#include "ffi/common/status.h"
#include "ffi/common/view.h"
#include "ffi/planning/device/fibers.h"
#include "ffi/planning/exact_domains.h"
#include "ffi/planning/relay.h"
#include "ffi/planning/ultraep.h"

namespace moe_lb::device {

// Plan as the functions without `OnFibers`. A domain must fit into a block, see `Fit`. time: of the longest block.
Status ExactOnFibers(MatrixView<const int32_t> counts, const ExactDomainsOptions& options,
                     MatrixView<int32_t> placement, MatrixView<int32_t> quota, BlockTime* time);
Status UltraEpOnFibers(MatrixView<const int32_t> placement, MatrixView<const int32_t> quota,
                       const UltraEpOptions& options, MatrixView<int32_t> new_placement, MatrixView<int32_t> new_quota,
                       BlockTime* time);
Status RelayOnFibers(MatrixView<const int32_t> placement, const RelayOptions& options, MatrixView<int32_t> relay,
                     BlockTime* time);

}  // namespace moe_lb::device
