// Planners as kernels of a stream. Defined in kernels.cu, and for tests without a GPU in ffi/testing/cuda.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/planning/device/edit_call.h"
#include "ffi/planning/device/exact_call.h"

namespace moe_lb::device {

// Calls that fit into a block, see `Fit`. The arrays of a call are device memory.
cudaError_t Launch(const ExactCall& call, cudaStream_t stream);
cudaError_t Launch(const UltraEpCall& call, cudaStream_t stream);
cudaError_t Launch(const RelayCall& call, cudaStream_t stream);

}  // namespace moe_lb::device
