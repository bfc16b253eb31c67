// The threads of one block as planners on a GPU use them.
//
// Code of this folder is a template over the type of its threads: `CudaThreads` here, or `FiberThreads` of fibers.h,
// which runs a block on the CPU and checks it. Both have these members; those of a warp are called by all its lanes.
//
//   lane(), warp(), thread()  position: lane of its warp, warp of the block, thread of the block
//   SyncWarp(), SyncBlock()   barriers; only these order accesses to memory between threads
//   Max, Min, Or, Sum         of a uint32_t over the warp
//   Ballot(condition)         the lanes for which the condition holds, bit i for lane i
//   From(value, lane)         the value of another lane
//   OrAt, AddAt(array, i, value)  atomic; OrAt returns the bits before. Another atomic access needs no barrier
//   Shared<V>(offset, size)   array at an offset in bytes in the shared memory of the block, with `size` elements
//   Global<V>(pointer, size)  array in global memory
//   Array<V>                  the type of both; elements are read and written by []. Fibers check indices
#pragma once

#include <cstddef>
#include <cstdint>

#include "ffi/planning/anywhere.h"

namespace moe_lb::device {

constexpr int kLanes = 32;
constexpr int kWarps = 8;
constexpr int kThreads = kLanes * kWarps;
// Shared memory of a block on the GPU with the least, an A100.
constexpr size_t kSharedBytes = 163 << 10;

MOE_LB_ANYWHERE size_t Size(int number) { return static_cast<size_t>(number); }

template <typename V>
MOE_LB_ANYWHERE V Least(V a, V b) {
  return b < a ? b : a;
}

template <typename V>
MOE_LB_ANYWHERE V Most(V a, V b) {
  return a < b ? b : a;
}

// Divides numbers below 2^16 by one of 1 to 2^16, by a product: a GPU takes tens of dependent instructions for a
// division by a variable. The factor is 2^32 / by rounded up, which raises the quotient by less than 2^-16.
class Divisor {
 public:
  Divisor() = default;
  MOE_LB_ANYWHERE explicit Divisor(int by) : factor_(((uint64_t{1} << 32) - 1) / static_cast<uint64_t>(by) + 1) {}
  MOE_LB_ANYWHERE int Quotient(int number) const {
    return static_cast<int>(static_cast<uint64_t>(number) * factor_ >> 32);
  }

 private:
  uint64_t factor_;
};

// Takes memory in steps of 8 bytes.
class Offsets {
 public:
  MOE_LB_ANYWHERE size_t Take(size_t bytes) {
    const size_t start = end;
    end += (bytes + 7) / 8 * 8;
    return start;
  }

  size_t end = 0;
};

// Index of the lowest bit of a word that is not 0, and the number of bits.
MOE_LB_DEVICE int LowestBit(uint32_t word) {
#ifdef __CUDACC__
  return __ffs(static_cast<int>(word)) - 1;
#else
  return __builtin_ctz(word);
#endif
}

MOE_LB_DEVICE int NumBits(uint32_t word) {
#ifdef __CUDACC__
  return __popc(word);
#else
  return __builtin_popcount(word);
#endif
}

#ifdef __CUDACC__

class CudaThreads {
 public:
  template <typename V>
  using Array = V*;

  __device__ explicit CudaThreads(char* shared) : shared_(shared) {}

  __device__ __forceinline__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ __forceinline__ int lane() const { return thread() % kLanes; }
  __device__ __forceinline__ int warp() const { return thread() / kLanes; }

  __device__ __forceinline__ void SyncWarp() const { __syncwarp(); }
  __device__ __forceinline__ void SyncBlock() const { __syncthreads(); }
  __device__ __forceinline__ uint32_t Max(uint32_t value) const { return __reduce_max_sync(kAll, value); }
  __device__ __forceinline__ uint32_t Min(uint32_t value) const { return __reduce_min_sync(kAll, value); }
  __device__ __forceinline__ uint32_t Or(uint32_t value) const { return __reduce_or_sync(kAll, value); }
  __device__ __forceinline__ uint32_t Sum(uint32_t value) const { return __reduce_add_sync(kAll, value); }
  __device__ __forceinline__ uint32_t Ballot(bool condition) const { return __ballot_sync(kAll, condition); }
  template <typename V>
  __device__ __forceinline__ V From(V value, int lane) const {
    return __shfl_sync(kAll, value, lane);
  }

  __device__ __forceinline__ uint32_t OrAt(uint32_t* array, int i, uint32_t bits) const {
    return atomicOr(array + i, bits);
  }
  __device__ __forceinline__ void AddAt(int32_t* array, int i, int32_t value) const { atomicAdd(array + i, value); }

  template <typename V>
  __device__ __forceinline__ V* Shared(size_t offset, size_t /*size*/) const {
    return reinterpret_cast<V*>(shared_ + offset);
  }
  template <typename V>
  __device__ __forceinline__ V* Global(V* data, size_t /*size*/) const {
    return data;
  }

 private:
  static constexpr uint32_t kAll = 0xffffffffu;

  char* shared_;
};

#endif

// More than any sum of tokens that a planner accepts.
constexpr uint64_t kTooManyTokens = uint64_t{1} << 40;

// Returns the sum over all threads of the block. sums: [warps], not read before the barrier of this function.
template <typename T>
MOE_LB_DEVICE uint64_t SumOfBlock(const T& t, typename T::template Array<uint64_t> sums, uint64_t value) {
  for (int distance = kLanes / 2; distance > 0; distance /= 2) value += t.From(value, t.lane() ^ distance);
  if (t.lane() == 0) sums[t.warp()] = value;
  t.SyncBlock();
  value = 0;
  for (int warp = 0; warp < kWarps; ++warp) value += static_cast<uint64_t>(sums[warp]);
  return value;
}

}  // namespace moe_lb::device
