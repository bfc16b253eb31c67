// What one process of a group shows to the others: a page of memory that all of them map.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace moe_lb {

// Where an array lies: the number that its process gave the allocation, and bytes into it.
struct SharedArray {
  uint64_t memory;
  uint64_t offset;
};

// One call of one process. Its process alone writes it, until that has ended.
struct alignas(64) SharedCall {
  static constexpr size_t kMaxKinds = 16;  // of weights that travel together
  static constexpr size_t kMaxMessage = 384;

  // By the host. The number of a call comes last, after all that belongs to it.
  std::atomic<uint32_t> announced;
  std::atomic<uint32_t> failed;  // the call that `message` is about
  std::atomic<uint32_t> queued;  // of the tasks of all, in their order: below it all of this process's are queued
  uint32_t timed_out;
  uint32_t is_internal;
  uint64_t request_hash;  // of the request, which must be equal on all processes
  SharedArray home[kMaxKinds];
  SharedArray slots[kMaxKinds];
  char message[kMaxMessage];

  // By the copy stream, and read by streams of others, in words of their own line of the cache.
  alignas(64) std::atomic<uint32_t> forwarded;  // the last task, from 1 on, that others copy from
  std::atomic<uint32_t> copied;                 // the call whose copies into this process are done
};

// A ring of calls: a process may be that many ahead of the slowest.
struct SharedCalls {
  static constexpr uint32_t kNum = 16;

  SharedCall calls[kNum];
};

static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == sizeof(uint32_t),
              "streams write these words");

// Whether `value` is `wanted` or was counted after it. Counts go round, and CUDA compares them in the same way.
inline bool HasReached(uint32_t value, uint32_t wanted) { return static_cast<int32_t>(value - wanted) >= 0; }

}  // namespace moe_lb
