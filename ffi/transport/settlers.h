// Threads on which programs of XLA go on.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>

namespace moe_lb {

// Completing the promise of an asynchronous handler runs the rest of that device's program, on the thread that
// completes it, up to the program's next wait; and XLA's own collectives wait by blocking. So two promises must never
// be completed by one thread, one after the other: the first device would wait in a collective for the second, whose
// program cannot go on. Nor may a thread that others need (a copier, the watchdog) complete one.
//
// Every job gets a thread for itself: an idle one if there is one, else a new one. Threads that were idle for
// `kIdleSeconds` end.
class Settlers {
 public:
  static constexpr int kIdleSeconds = 10;

  // Starts at the first use and is never destroyed: jobs may outlast whoever asked for them.
  static Settlers& OfProcess();

  // Returns at once. A job must not throw; it may block.
  void Run(std::function<void()> job);

  size_t num_threads() const;

 private:
  void Work();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  size_t num_idle_ = 0;
  size_t num_threads_ = 0;
};

}  // namespace moe_lb
