// Deadlines: one thread that sleeps until the earliest of them and calls back what is late.
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

// The last thread that is left when all of a program wait for a rank that never comes, so it must not be a thread of
// XLA. XLA gives a handler nothing that outlives its call site, and a thread per call site would be hundreds of them:
// hence one for the process, `OfProcess`, which starts at the first use and is never destroyed.
class Watchdog {
 public:
  using Clock = std::chrono::steady_clock;
  using Ticket = std::pair<Clock::time_point, uint64_t>;  // deadline, number

  static Watchdog& OfProcess();

  Watchdog();
  ~Watchdog();  // forgets what is not due yet
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // Calls `late` once, on the watchdog's thread, soon after the deadline, unless it is cancelled before. `late` must be
  // short, must not throw, and may call `Watch` and `Cancel`. The watchdog holds no lock during the call.
  Ticket Watch(Clock::time_point deadline, std::function<void()> late);

  // Forgets a deadline and destroys its callback. False where the callback has run or is running: Cancel does not wait
  // for it.
  bool Cancel(const Ticket& ticket);

  size_t num_waiting() const;

 private:
  void Run();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Ticket, std::function<void()>> waiting_;
  uint64_t num_tickets_ = 0;
  // When the thread wakes up by itself. Only an earlier deadline needs to wake it: cancelling and watching again, as
  // every meeting does, costs no switch of threads.
  Clock::time_point wakes_at_ = Clock::time_point::max();
  bool stopping_ = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace moe_lb
