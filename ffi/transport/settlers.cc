#include "ffi/transport/settlers.h"

#include <chrono>
#include <thread>
#include <utility>

#include "ffi/transport/start_thread.h"

namespace moe_lb {

Settlers& Settlers::OfProcess() {
  // Leaked on purpose: a job may still run the rest of a program at exit, and it cannot be stopped.
  static Settlers* const settlers = new Settlers(std::chrono::seconds(kIdleSeconds));
  return *settlers;
}

Status Settlers::Run(std::vector<std::function<void()>> jobs) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (size_t more = 1; more <= jobs.size(); ++more) {
      // A notified thread counts as idle, and its job as open, until it holds the lock. With more jobs than idle
      // threads, start a thread: else a job would wait for another to end, and may wait forever for a job not started
      // yet.
      if (jobs_.size() + more <= num_idle_) continue;
      // Detached, because a job of a hanging program does not end and could not be joined.
      if (Status bad = StartThread([this] { std::thread([this] { Work(); }).detach(); })) return bad;
      ++num_threads_;
    }
    for (auto& job : jobs) jobs_.push_back(std::move(job));
  }
  for (size_t i = 0; i < jobs.size(); ++i) changed_.notify_one();
  return Ok();
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
      const bool woken = changed_.wait_for(lock, longest_idle_, [this] { return !jobs_.empty(); });
      // Under the lock since the wait ended, so Run does not count a thread about to end.
      --num_idle_;
      if (!woken) break;
    }
    std::function<void()> job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    job();
    // Destroy the job without the lock, because its destructors may run any code.
    job = nullptr;
    lock.lock();
  }
  --num_threads_;
}

}  // namespace moe_lb
