// Deadlines: one thread sleeps until the earliest of them and calls its callback.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

namespace moe_lb {

// Runs on its own thread: if all threads of a program wait for a missing rank, none of XLA's is left to report it. XLA
// gives a handler no state that outlives its call site, and one thread per call site would be hundreds. So there is one
// watchdog per process, `OfProcess`, created at the first use and never destroyed.
class Watchdog {
 public:
  using Clock = std::chrono::steady_clock;
  using Ticket = std::pair<Clock::time_point, uint64_t>;  // deadline, number

  static Watchdog& OfProcess();

  Watchdog();
  ~Watchdog();  // drops pending deadlines
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // Calls `late` once, on the watchdog's thread, soon after the deadline, unless it is cancelled before. `late` must be
  // short, must not throw, and may call `Watch` and `Cancel`. The watchdog holds no lock during the call.
  Ticket Watch(Clock::time_point deadline, std::function<void()> late);

  // Removes a deadline and destroys its callback. Returns false if the callback has run or is running; Cancel does not
  // wait for it.
  bool Cancel(const Ticket& ticket);

  size_t num_waiting() const;

 private:
  void Run();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Ticket, std::function<void()>> waiting_;
  uint64_t num_tickets_ = 0;
  // Next time the thread wakes by itself. Only an earlier deadline must wake it, so a cancel and a new watch per
  // generation cost no thread switch.
  Clock::time_point wakes_at_ = Clock::time_point::max();
  bool stopping_ = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace moe_lb
