// What every function of the stand-in does first.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <string>

namespace moe_lb::testing {

// Counts a call, and fails it where a test wants that.
cudaError_t Enter(const char* name);

// Whether an ordering call from there is to be left out.
bool IsIgnored(const char* function, const void* returns_to);

// Notes what CUDA forbids.
cudaError_t Forbidden(cudaError_t error, const std::string& what);

// Memory of the host's that the device reaches. `memory` stays the caller's.
void AddPinned(void* memory, size_t size);
bool IsPinned(const void* memory);

}  // namespace moe_lb::testing
