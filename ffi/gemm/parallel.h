// Tasks on the threads of somebody else's pool.
#pragma once

#include <cstdint>
#include <functional>

namespace moe_lb {

struct Pool {
  int64_t num_threads = 1;  // those of the pool
  std::function<void(std::function<void()>)> schedule;
};

// Calls `task` with each of 0 ... num_tasks - 1, in that order but at the same time, on this thread and the pool's;
// whether all returned true. It waits for no thread that has not begun a task: this one does what nobody takes, so
// that all threads of a pool may be in here at once.
bool ForEachTask(const Pool& pool, int64_t num_tasks, std::function<bool(int64_t)> task);

}  // namespace moe_lb
