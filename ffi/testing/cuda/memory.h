// Stand-in GPU memory, shareable between processes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace moe_lb::testing {

enum class MemoryKind {
  kClassic,  // from cudaMalloc; shared by cudaIpcMemHandle_t
  kMapped,   // from the driver's cuMemCreate and cuMemMap; shared by file descriptors
  kPool,     // from cudaMallocAsync, whose pools alone can be shared
};

struct Allocation {
  char* begin = nullptr;
  size_t size = 0;
  uint64_t id = 0;  // unique
  MemoryKind kind = MemoryKind::kClassic;
  int descriptor = -1;  // of its file: the memory, then `OpenCount` in a page of its own
};

// Allocates on the current device, at the given address or anywhere (default).
Allocation NewAllocation(size_t size, MemoryKind kind, char* at = nullptr);
// A violation for classic memory that another process has open.
void FreeAllocation(const Allocation& allocation);

// Returns the allocation containing an address; of size 0 if there is none.
Allocation AllocationOf(const void* address);

// Number of allocations of other processes mapped in this one.
int64_t NumMapped();
// Handles of allocations that keep them alive.
int64_t NumHandles();
// Ranges of addresses reserved for memory of other processes.
int64_t NumReserved();

}  // namespace moe_lb::testing
