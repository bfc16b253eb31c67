// What the stand-in needs to hand work from thread to thread without ThreadSanitizer taking it for an order: CUDA
// promises none of these orders, so a program that relies on them has a race.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <cstdint>
#include <ctime>

// For functions whose atomics must make no order that the sanitizer sees. They use builtins: the functions of
// std::atomic would be instrumented wherever they are not inlined.
#define MOE_LB_UNSEEN __attribute__((no_sanitize("thread"), noinline))

namespace moe_lb::testing {

// Wakes threads that wait for something to change. System calls are nothing to the sanitizer.
class Bell {
 public:
  // Before the condition is looked at.
  MOE_LB_UNSEEN uint32_t Listen() {
    __atomic_fetch_add(&listening_, 1, __ATOMIC_SEQ_CST);
    return __atomic_load_n(&rings_, __ATOMIC_SEQ_CST);
  }

  // Until it rings after `heard`, or some milliseconds, since a stream may be held up by what rings no bell.
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

  // Returns when `is_so()`, which is asked after every ring.
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
