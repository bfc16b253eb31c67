// Calls of one process, in a page of memory mapped by all processes of a group.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace moe_lb {

// Address of an array: the allocation number of its process, and the offset in bytes.
struct SharedArray {
  uint64_t memory;
  uint64_t offset;
};

// One call of one process. Only that process writes it, until it has ended.
struct alignas(64) SharedCall {
  static constexpr size_t kMaxKinds = 16;  // of weights copied together
  static constexpr size_t kMaxMessage = 384;

  // Written by the host. The call number is stored last, after the data of the call.
  std::atomic<uint32_t> announced;
  std::atomic<uint32_t> failed;  // the call of `message`
  std::atomic<uint32_t> queued;  // all tasks of this process below this index are queued
  uint32_t timed_out;
  uint32_t is_internal;
  uint64_t request_hash;  // of the request, which must be equal on all processes
  SharedArray home[kMaxKinds];
  SharedArray slots[kMaxKinds];
  char message[kMaxMessage];

  // Written by the copy stream and read by streams of other processes; in its own cache line.
  alignas(64) std::atomic<uint32_t> forwarded;  // the last completed task with copies by others, from 1 on
  std::atomic<uint32_t> copied;                 // the call whose copies into this process are complete
};

// A ring of calls: a process may be at most kNum calls ahead of the slowest.
struct SharedCalls {
  static constexpr uint32_t kNum = 16;

  SharedCall calls[kNum];
  // Why this process may end: the rank of the first process known to have ended, from 1 on, and its last call if that
  // has failed; 0 for none.
  std::atomic<uint32_t> first_ended;
  std::atomic<uint32_t> last_failed;
};

static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == sizeof(uint32_t),
              "streams write these words");

// True if `value` equals `wanted` or was counted after it. Counters wrap around; CUDA compares them in the same way.
inline bool HasReached(uint32_t value, uint32_t wanted) { return static_cast<int32_t>(value - wanted) >= 0; }

}  // namespace moe_lb
