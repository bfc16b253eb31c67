// Entry and checks shared by all functions of the stand-in.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <string>

namespace moe_lb::testing {

// Counts a call, and returns the error set for it by a test.
cudaError_t Enter(const char* name);
#define MOE_LB_ENTER(name) \
  if (const cudaError_t bad = Enter(name); bad != cudaSuccess) return bad

// The device of this thread, as this process numbers it.
int CurrentDevice();
// The number of devices that this process sees.
int NumDevices();
// The number of a device on the machine.
int MachineDevice(int device);

// Returns an error of a runtime function, which cudaGetLastError then returns.
cudaError_t Fail(cudaError_t error);

// True if an ordering call from this place is to be ignored.
bool IsIgnored(const char* function, const void* returns_to);

// Records a violation of CUDA's rules.
cudaError_t Forbidden(cudaError_t error, const std::string& what);

// Registers host memory for access by the device. The caller keeps ownership of `memory`.
void AddPinned(void* memory, size_t size);
bool IsPinned(const void* memory, size_t size = 1);

}  // namespace moe_lb::testing
