// Memory of a GPU that other processes map.
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

// Allocations of this process that others map. XLA cuts its arrays out of few large ones, so that each is sent once; a
// call then names an array by the number of its allocation and its distance from the begin.
//
// CUDA numbers allocations, and gives no number twice: memory that was freed and is allocated anew at the same address
// has another. Others are told then to give up the old one; until then it stays mapped with them, and so allocated.
class SharedMemory {
 public:
  explicit SharedMemory(Neighbours* neighbours) : neighbours_(neighbours) {}

  // Says where an array lies, having sent its allocation to all of `processes` that do not have it yet. An array of no
  // bytes, at a null pointer, lies in allocation 0.
  Status Share(const void* array, const std::vector<int64_t>& processes, SharedArray* shared);

 private:
  struct Allocation {
    CUdeviceptr begin;
    size_t size;
    std::set<int64_t> known_to;
  };

  Status Send(uint64_t id, const Allocation& allocation, int64_t process) const;
  void ForgetBelow(uint64_t id, CUdeviceptr begin, size_t size);

  Neighbours* const neighbours_;
  std::mutex mutex_;
  std::map<uint64_t, Allocation> allocations_;
};

// An allocation of another process, mapped here. It is only read.
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

// Those of all others, mapped when they are first needed.
class MappedMemory {
 public:
  explicit MappedMemory(Neighbours* neighbours) : neighbours_(neighbours) {}

  // Where an array of another process lies here. Its allocation must have been sent before it was named; that it comes
  // is awaited so long.
  Status Find(int64_t process, const SharedArray& array, int device, double timeout_s, const std::byte** here);

 private:
  void DropGone(int64_t process);

  Neighbours* const neighbours_;
  std::mutex mutex_;
  std::map<std::pair<int64_t, uint64_t>, std::unique_ptr<MappedAllocation>> mapped_;
};

// Nothing, or why others cannot map the allocation that holds an address of a device.
Status CheckShareable(const void* array, int device);

}  // namespace moe_lb::peer_cuda
