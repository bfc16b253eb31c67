// Parallel tasks on the threads of an external pool.
#pragma once

#include <cstdint>
#include <functional>

namespace moe_lb {

struct Pool {
  int64_t num_threads = 1;  // those of the pool
  std::function<void(std::function<void()>)> schedule;
};

// Call `task` concurrently with each of 0 ... num_tasks - 1, started in that order, on this thread and the pool's.
// Returns true if all calls returned true. This thread runs every task not started by another thread, so all threads
// of a pool may call this at once.
bool ForEachTask(const Pool& pool, int64_t num_tasks, std::function<bool(int64_t)> task);

}  // namespace moe_lb
