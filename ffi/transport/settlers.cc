#include "ffi/transport/settlers.h"

#include <chrono>
#include <thread>
#include <utility>

namespace moe_lb {

Settlers& Settlers::OfProcess() {
  // They are leaked on purpose: at exit a job may still run the rest of a program, and nobody can tell it to stop.
  static Settlers* const settlers = new Settlers;
  return *settlers;
}

void Settlers::Run(std::function<void()> job) {
  bool start = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    jobs_.push_back(std::move(job));
    // A thread that was notified counts as idle, and its job as open, until it holds the lock. So with more jobs than
    // idle threads one job would wait for the end of another, and a job may wait for ever for what the other was to
    // start.
    start = jobs_.size() > num_idle_;
    if (start) ++num_threads_;
  }
  if (start) {
    // It is detached, since a job of a program that hangs never ends and nobody could join it.
    std::thread([this] { Work(); }).detach();
  } else {
    changed_.notify_one();
  }
}

size_t Settlers::num_threads() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return num_threads_;
}

void Settlers::Work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    if (jobs_.empty()) {
      ++num_idle_;
      const bool woken = changed_.wait_for(lock, std::chrono::seconds(kIdleSeconds), [this] { return !jobs_.empty(); });
      // This is under the lock since the wait ended, so Run never counts on a thread that is about to end.
      --num_idle_;
      if (!woken) break;
    }
    std::function<void()> job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    job();
    // What the job owns dies without the lock, since nothing is known here of what its end does.
    job = nullptr;
    lock.lock();
  }
  --num_threads_;
}

}  // namespace moe_lb
