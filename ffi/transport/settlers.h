// Threads completing promises of XLA, and so continuing its programs.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <vector>

#include "ffi/common/status.h"

namespace moe_lb {

// Completing the promise of an asynchronous handler runs the rest of the device's program on the completing thread, up
// to the program's next wait. XLA's own collectives block. So one thread must not complete two promises one after the
// other: the first device would wait in a collective for the second, whose program cannot continue. A thread with other
// duties (a copier, the watchdog) must not complete one either.
//
// Every job gets its own thread: an idle one if there is one, else a new one. A thread ends after `longest_idle`
// without a job, `kIdleSeconds` in the instance of the process.
class Settlers {
 public:
  static constexpr int kIdleSeconds = 10;

  // Created at the first use and never destroyed: jobs may outlive their callers.
  static Settlers& OfProcess();

  explicit Settlers(std::chrono::milliseconds longest_idle) : longest_idle_(longest_idle) {}

  // Returns at once. A job must not throw; it may block. Fails, and runs no job, if a thread cannot be started.
  Status Run(std::vector<std::function<void()>> jobs);

  size_t num_threads() const;

 private:
  void Work();

  const std::chrono::milliseconds longest_idle_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  size_t num_idle_ = 0;
  size_t num_threads_ = 0;
};

}  // namespace moe_lb
