// Memory of played GPUs that processes can share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace moe_lb::testing {

enum class MemoryKind {
  kClassic,  // as cudaMalloc gives it: shared by cudaIpcMemHandle_t
  kMapped,   // as the driver's cuMemCreate and cuMemMap give it: shared by file descriptors
};

struct Allocation {
  char* begin = nullptr;
  size_t size = 0;
  uint64_t id = 0;  // never the same again
  MemoryKind kind = MemoryKind::kClassic;
  int descriptor = -1;
};

// At that address, or, by default, anywhere.
Allocation NewAllocation(size_t size, MemoryKind kind, char* at = nullptr);
void FreeAllocation(const Allocation& allocation);

// The one that holds an address; without one, of size 0.
Allocation AllocationOf(const void* address);

// Of this process: allocations of others that are mapped here.
int64_t NumMapped();

}  // namespace moe_lb::testing
