#include "ffi/gemm/parallel.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>

namespace moe_lb {
namespace {

// Shared with the pool, because its threads may start after the end. The caller of ForEachTask has then returned, and
// `task_` may refer to destroyed objects: a thread without a task must not call it.
class Tasks {
 public:
  Tasks(int64_t total, std::function<bool(int64_t)> task) : total_(total), task_(std::move(task)) {}

  void Work() {
    int64_t mine = 0;
    // Take tasks in order: callers put the longest first.
    for (int64_t i = next_.fetch_add(1); i < total_; i = next_.fetch_add(1), ++mine) {
      if (!task_(i)) failed_ = true;
    }
    // Each thread adds its tasks once, to avoid contention. A thread reading the total sees the results of all
    // tasks.
    if (mine > 0 && done_.fetch_add(mine) + mine == total_) {
      // Without the lock, the notification could fall between the comparison and the sleep of Wait, and be lost.
      const std::lock_guard<std::mutex> lock(mutex_);
      changed_.notify_all();
    }
  }

  bool Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return done_ == total_; });
    return !failed_;
  }

 private:
  const int64_t total_;
  const std::function<bool(int64_t)> task_;
  std::atomic<int64_t> next_{0};
  std::atomic<int64_t> done_{0};
  std::atomic<bool> failed_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace

bool ForEachTask(const Pool& pool, int64_t num_tasks, std::function<bool(int64_t)> task) {
  if (num_tasks == 0) return true;
  const auto tasks = std::make_shared<Tasks>(num_tasks, std::move(task));
  // This thread works too, so that all tasks complete even without a free pool thread.
  const int64_t num_helpers = std::min(pool.num_threads, num_tasks) - 1;
  for (int64_t i = 0; i < num_helpers; ++i) pool.schedule([tasks] { tasks->Work(); });
  tasks->Work();
  return tasks->Wait();
}

}  // namespace moe_lb
