#include "ffi/transport/watchdog.h"

namespace moe_lb {

Watchdog& Watchdog::OfProcess() {
  // Leaked on purpose: handlers may set deadlines while the process destroys its static objects.
  static Watchdog* const watchdog = new Watchdog;
  return *watchdog;
}

Watchdog::Watchdog() : thread_([this] { Run(); }) {}

Watchdog::~Watchdog() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

Watchdog::Ticket Watchdog::Watch(Clock::time_point deadline, std::function<void()> late) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Ticket ticket(deadline, num_tickets_++);
  waiting_.emplace(ticket, std::move(late));
  // The thread sets `wakes_at_` and starts to sleep under the same lock, so it cannot miss an earlier deadline.
  if (deadline < wakes_at_) {
    wakes_at_ = deadline;
    changed_.notify_one();
  }
  return ticket;
}

bool Watchdog::Cancel(const Ticket& ticket) {
  std::function<void()> cancelled;  // destroyed after the unlock: its captures may use the watchdog
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = waiting_.find(ticket);
  if (found == waiting_.end()) return false;
  cancelled.swap(found->second);
  waiting_.erase(found);
  return true;
}

size_t Watchdog::num_waiting() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return waiting_.size();
}

void Watchdog::Run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    const auto first = waiting_.begin();
    if (first != waiting_.end() && first->first.first <= Clock::now()) {
      std::function<void()> late = std::move(first->second);
      waiting_.erase(first);
      // `late` takes the lock of a rendezvous, which calls Watch with that lock held. Holding this lock during the call
      // would invert the order and could deadlock.
      lock.unlock();
      late();
      late = nullptr;  // destroys its captures without the lock
      lock.lock();
      continue;
    }
    wakes_at_ = first == waiting_.end() ? Clock::time_point::max() : first->first.first;
    // wait, not wait_until(max): some standard libraries overflow there.
    if (first == waiting_.end()) {
      changed_.wait(lock);
    } else {
      // A copy, because wait_until keeps a reference while it sleeps, and Watch changes `wakes_at_` meanwhile.
      const Clock::time_point until = wakes_at_;
      changed_.wait_until(lock, until);
    }
  }
}

}  // namespace moe_lb
