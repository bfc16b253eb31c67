// Communication between threads, invisible to ThreadSanitizer. CUDA does not guarantee these orders, so a
// program relying on them must be reported as a race.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <cstdint>
#include <ctime>

// For functions whose atomics must create no order for the sanitizer. They use builtins, because std::atomic functions
// are instrumented if they are not inlined.
#define MOE_LB_UNSEEN __attribute__((no_sanitize("thread"), noinline))

namespace moe_lb::testing {

// Wakes waiting threads. The sanitizer does not track the system calls.
class Bell {
 public:
  // Call before the test of the condition.
  MOE_LB_UNSEEN uint32_t Listen() {
    __atomic_fetch_add(&listening_, 1, __ATOMIC_SEQ_CST);
    return __atomic_load_n(&rings_, __ATOMIC_SEQ_CST);
  }

  // Waits for a ring after `heard`, or 5 ms, because a stream may wait for an event without a ring.
  MOE_LB_UNSEEN void Wait(uint32_t heard) {
    const timespec limit = {0, 5000000};
    syscall(SYS_futex, &rings_, FUTEX_WAIT_PRIVATE, heard, &limit, nullptr, 0);
  }

  MOE_LB_UNSEEN void Leave() { __atomic_fetch_sub(&listening_, 1, __ATOMIC_SEQ_CST); }

  MOE_LB_UNSEEN void Ring() {
    __atomic_fetch_add(&rings_, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&listening_, __ATOMIC_SEQ_CST) == 0) return;
    syscall(SYS_futex, &rings_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }

  // Returns when `is_so()` is true; tested after every ring.
  template <typename Condition>
  void Until(const Condition& is_so) {
    while (!is_so()) {
      const uint32_t heard = Listen();
      if (!is_so()) Wait(heard);
      Leave();
    }
  }

 private:
  uint32_t rings_ = 0;
  uint32_t listening_ = 0;
};

}  // namespace moe_lb::testing
