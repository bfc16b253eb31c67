// GPU memory mapped by other processes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "ffi/common/driver_calls_cuda.h"
#include "ffi/transport/neighbours_cuda.h"
#include "ffi/transport/shared_calls.h"

namespace moe_lb::peer_cuda {

// Allocations of this process mapped by others. XLA places its arrays in a few large allocations, so each allocation is
// sent once. A call then names an array by allocation number and offset.
//
// CUDA numbers allocations uniquely: memory freed and allocated again at the same address gets a new number. The other
// processes are notified to unmap freed allocations. Memory of cuMemCreate stays allocated until they do, so nobody
// waits for them, and a process that ends unmaps all. Memory of cudaMalloc must not be freed before: CheckShareable
// refuses allocators that free it.
class SharedMemory {
 public:
  explicit SharedMemory(Neighbours* neighbours) : neighbours_(neighbours) {}

  // Returns the address of an array and sends its allocation to those of `processes` that lack it, waiting up to the
  // time limit for each to read its messages. An empty array (null pointer) is in allocation 0.
  SocketResult Share(const void* array, const std::vector<int64_t>& processes, double timeout_s, SharedArray* shared);

  // Notifies the other processes of allocations that were freed. No copy reads them: XLA frees weights only after their
  // readers. A notice that does not fit into the buffer of a socket is sent by a later call.
  void ForgetFreed();

 private:
  struct Allocation {
    CUdeviceptr begin;
    size_t size;
    std::set<int64_t> known_to;
  };

  Status Locate(const void* array, Allocation* allocation, SharedArray* shared) const;
  SocketResult Send(uint64_t id, const Allocation& allocation, int64_t process, double timeout_s);
  SocketResult SendFreed(int64_t process, double timeout_s);

  Neighbours* const neighbours_;
  std::mutex mutex_;
  std::map<uint64_t, Allocation> allocations_;
  std::map<int64_t, std::vector<uint64_t>> freed_;  // allocations that a process must still be notified of
};

// An allocation of another process, mapped read-only by convention.
class MappedAllocation {
 public:
  MappedAllocation() = default;
  ~MappedAllocation();
  MappedAllocation(const MappedAllocation&) = delete;
  MappedAllocation& operator=(const MappedAllocation&) = delete;

  Status Map(const PeerNote& note, const Descriptor& descriptor, int device);

  const std::byte* begin() const { return begin_; }
  size_t size() const { return size_; }

 private:
  Status MapHandle(CUmemGenericAllocationHandle handle, int device);

  std::byte* begin_ = nullptr;
  size_t size_ = 0;
  CUdeviceptr reserved_ = 0;
  bool is_mapped_ = false;
};

// Mapped allocations of all other processes, mapped at the first use.
class MappedMemory {
 public:
  explicit MappedMemory(Neighbours* neighbours) : neighbours_(neighbours) {}

  // Returns the local address of an array of `bytes` of another process. Its allocation must be sent before the array
  // is named; waits for it up to timeout_s.
  Status Find(int64_t process, const SharedArray& array, size_t bytes, int device, double timeout_s,
              const std::byte** here);

  // Unmaps allocations freed by their process. It frees them only after all copies of this process have read them.
  void DropGone();

 private:
  void DropGoneLocked();

  Neighbours* const neighbours_;
  std::mutex mutex_;
  std::map<std::pair<int64_t, uint64_t>, std::unique_ptr<MappedAllocation>> mapped_;
};

// Return a failure if other processes cannot map the allocation containing a device address, or if its allocator may
// free it while they do.
Status CheckShareable(const void* array, int device);

}  // namespace moe_lb::peer_cuda
