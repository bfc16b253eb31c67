// Copy threads of CPU devices, the counterpart of a GPU's copy engines.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <mutex>
#include <thread>

#include "ffi/common/status.h"

namespace moe_lb {

// Runs jobs one after the other, in the order of `Enqueue`, on its own thread, which sleeps if there are none.
class Copier {
 public:
  Copier();
  ~Copier();  // after the last job
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  using Jobs = std::list<std::function<void()>>;

  // Returns at once. A job must not throw. It may wait for other copiers, never for this one.
  void Enqueue(std::function<void()> job);
  // Allocates no memory. Create all jobs of a call before the first is enqueued: an exception between them would free
  // the buffers of those running.
  void Enqueue(Jobs jobs) noexcept;

 private:
  void Run();

  std::mutex mutex_;
  std::condition_variable changed_;
  Jobs jobs_;
  bool stopping_ = false;
  std::thread thread_;  // last: it uses all of the above
};

// One copier per device of the process, created at the first use and never destroyed. XLA gives a handler no state that
// outlives its call site, and one thread per call site would be hundreds.
class Copiers {
 public:
  // Fails if a copier cannot be started.
  static Status Of(int64_t device, Copier** copier);
};

}  // namespace moe_lb
