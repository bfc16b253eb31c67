#include "ffi/transport/copier.h"

#include <map>
#include <memory>
#include <utility>

#include "ffi/transport/start_thread.h"

namespace moe_lb {

Copier::Copier() : thread_([this] { Run(); }) {}

Copier::~Copier() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  // The thread ends only with an empty queue: callers wait for the end of every enqueued job.
  thread_.join();
}

void Copier::Enqueue(std::function<void()> job) {
  Jobs jobs;
  jobs.push_back(std::move(job));
  Enqueue(std::move(jobs));
}

void Copier::Enqueue(Jobs jobs) noexcept {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    jobs_.splice(jobs_.end(), jobs);
  }
  // Unlock first, so that the copier does not wake up to wait for the lock.
  changed_.notify_one();
}

void Copier::Run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    Jobs job;
    job.splice(job.end(), jobs_, jobs_.begin());
    // A job runs without the lock because it may enqueue on this copier: a finished copy enqueues its dependents.
    lock.unlock();
    job.front()();
    job.clear();  // destroys its captures without the lock
    lock.lock();
  }
}

Status Copiers::Of(int64_t device, Copier** copier) {
  struct All {
    std::mutex mutex;
    std::map<int64_t, std::unique_ptr<Copier>> by_device;
  };
  // Leaked on purpose: copiers may still run when the process exits, and must be destroyed after everything that their
  // jobs use.
  static All* const all = new All;
  const std::lock_guard<std::mutex> lock(all->mutex);
  std::unique_ptr<Copier>& found = all->by_device[device];
  if (found == nullptr) {
    if (Status bad = StartThread([&] { found = std::make_unique<Copier>(); })) return bad;
  }
  *copier = found.get();
  return Ok();
}

}  // namespace moe_lb
