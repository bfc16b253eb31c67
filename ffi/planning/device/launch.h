// Planners as kernels of a stream. Defined in kernels.cu, and for tests without a GPU in ffi/testing/cuda.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/planning/device/exact_call.h"

namespace moe_lb::device {

// Shared memory of a block on the GPU with the least, an A100.
constexpr size_t kSharedBytes = 163 << 10;

// A block for each domain. The arrays of the call are device memory.
cudaError_t Launch(const ExactCall& call, cudaStream_t stream);

}  // namespace moe_lb::device
