#include "ffi/transport/copier.h"

#include <map>
#include <memory>
#include <utility>

namespace moe_lb {

Copier::Copier() : thread_([this] { Run(); }) {}

Copier::~Copier() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  // The thread ends only when the queue is empty: somebody waits for the end of every job that was enqueued.
  thread_.join();
}

void Copier::Enqueue(std::function<void()> job) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    jobs_.push_back(std::move(job));
  }
  // The lock is given up first, so that the copier does not wake up only to wait for it.
  changed_.notify_one();
}

void Copier::Run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    std::function<void()> job = std::move(jobs_.front());
    jobs_.pop_front();
    // A job runs without the lock, because it may enqueue on this copier: a finished copy enqueues those that waited
    // for it.
    lock.unlock();
    job();
    job = nullptr;  // what it owns dies without the lock
    lock.lock();
  }
}

Copier& Copiers::Of(int64_t device) {
  struct All {
    std::mutex mutex;
    std::map<int64_t, std::unique_ptr<Copier>> by_device;
  };
  // They are leaked on purpose. Copiers may still be at work when the process exits, and what their jobs use must not
  // be destroyed before them.
  static All* const all = new All;
  const std::lock_guard<std::mutex> lock(all->mutex);
  std::unique_ptr<Copier>& copier = all->by_device[device];
  if (copier == nullptr) copier = std::make_unique<Copier>();
  return *copier;
}

}  // namespace moe_lb
