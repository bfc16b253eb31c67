// The kernel of `exact` run by fibers on the CPU.
#pragma once

#include <cstdint>

#include "ffi/common/status.h"
#include "ffi/common/view.h"
#include "ffi/planning/device/fibers.h"
#include "ffi/planning/exact_domains.h"

namespace moe_lb::device {

// Plans as ExactDomains. A domain must fit into a block (exact_call.h). time: of the longest block.
Status ExactOnFibers(MatrixView<const int32_t> counts, int64_t domain, const ExactDomainsOptions& options,
                     size_t shared_bytes, MatrixView<int32_t> placement, MatrixView<int32_t> quota, BlockTime* time);

}  // namespace moe_lb::device
