#include "ffi/transport/settlers.h"

#include <chrono>
#include <thread>
#include <utility>

namespace moe_lb {

Settlers& Settlers::OfProcess() {
  static Settlers* const settlers = new Settlers;
  return *settlers;
}

void Settlers::Run(std::function<void()> job) {
  bool start = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    jobs_.push_back(std::move(job));
    start = jobs_.size() > num_idle_;
    if (start) ++num_threads_;
  }
  if (start) {
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
      --num_idle_;
      if (!woken) break;
    }
    std::function<void()> job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    job();
    job = nullptr;
    lock.lock();
  }
  --num_threads_;
}

}  // namespace moe_lb
