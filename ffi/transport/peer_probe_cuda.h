// Tries whether this process's GPU can copy from the memory of other processes.
#pragma once

#include <cstdint>
#include <vector>

#include "ffi/common/status.h"

namespace moe_lb::peer_cuda {

// Maps an array of each of the processes and copies from it; a failure names the pair. All of them call it, with
// `array` the address of an int32 on the device that holds the number of its process, and connected to each other. The
// arrays stay until all calls have returned, and a further call begins after that.
Status TryPeers(const std::vector<int64_t>& processes, const void* array, int device, double timeout_s);

// A failure names the first ordered pair of GPUs of this process of which one cannot access the memory of the other.
Status CheckPeerAccess();

}  // namespace moe_lb::peer_cuda
