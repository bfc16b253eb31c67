#include "ffi/transport/watchdog.h"

#include <atomic>
#include <future>
#include <memory>
#include <vector>

#include "ffi/common/testing.h"

namespace {

using moe_lb::Watchdog;
using std::chrono::milliseconds;

Watchdog::Clock::time_point In(milliseconds time) { return Watchdog::Clock::now() + time; }

void TheEarliestIsCalledFirst() {
  Watchdog watchdog;
  std::vector<int> called;
  std::promise<void> over;
  watchdog.Watch(In(milliseconds(30)), [&] {
    called.push_back(2);
    over.set_value();
  });
  watchdog.Watch(In(milliseconds(5)), [&] { called.push_back(0); });
  watchdog.Watch(In(milliseconds(15)), [&] { called.push_back(1); });
  over.get_future().get();
  EXPECT((called == std::vector<int>{0, 1, 2}));
  EXPECT_EQ(watchdog.num_waiting(), 0U);
}

void NoCallbackRunsBeforeItsDeadline() {
  Watchdog watchdog;
  const auto deadline = In(milliseconds(20));
  std::promise<Watchdog::Clock::time_point> called;
  watchdog.Watch(deadline, [&] { called.set_value(Watchdog::Clock::now()); });
  EXPECT(called.get_future().get() >= deadline);
}

void WhatIsCancelledIsGone() {
  Watchdog watchdog;
  const auto owned = std::make_shared<int>(0);
  for (int i = 0; i < 10000; ++i) {
    const auto ticket = watchdog.Watch(In(std::chrono::hours(1)), [owned] {});
    EXPECT(watchdog.Cancel(ticket));
    EXPECT(!watchdog.Cancel(ticket));
  }
  EXPECT_EQ(watchdog.num_waiting(), 0U);
  EXPECT_EQ(owned.use_count(), 1);
}

// A cancelled deadline leaves a thread sleeping too long; a shorter one must wake it.
void AnEarlierDeadlineWakesTheThread() {
  Watchdog watchdog;
  watchdog.Cancel(watchdog.Watch(In(std::chrono::hours(1)), [] {}));
  std::promise<void> called;
  watchdog.Watch(In(milliseconds(1)), [&] { called.set_value(); });
  EXPECT(called.get_future().wait_for(std::chrono::seconds(20)) == std::future_status::ready);
}

void CallbacksMayWatchAndCancel() {
  Watchdog watchdog;
  std::promise<bool> called;
  const auto other = watchdog.Watch(In(std::chrono::hours(1)), [] {});
  watchdog.Watch(In(milliseconds(1)),
                 [&] { watchdog.Watch(In(milliseconds(1)), [&] { called.set_value(watchdog.Cancel(other)); }); });
  EXPECT(called.get_future().get());
}

// Each deadline is either called or cancelled, never both.
void ManyThreads() {
  Watchdog watchdog;
  std::atomic<int> num_called{0}, num_cancelled{0};
  constexpr int kThreads = 16, kEach = 300;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int j = 0; j < kEach; ++j) {
        const auto ticket = watchdog.Watch(In(milliseconds(j % 3)), [&] { ++num_called; });
        if (j % 2 == 0 && watchdog.Cancel(ticket)) ++num_cancelled;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  while (num_called + num_cancelled < kThreads * kEach) std::this_thread::yield();
  std::this_thread::sleep_for(milliseconds(10));
  EXPECT_EQ(num_called + num_cancelled, kThreads * kEach);
  EXPECT_EQ(watchdog.num_waiting(), 0U);
}

}  // namespace

int main() {
  TheEarliestIsCalledFirst();
  NoCallbackRunsBeforeItsDeadline();
  WhatIsCancelledIsGone();
  AnEarlierDeadlineWakesTheThread();
  CallbacksMayWatchAndCancel();
  ManyThreads();
}
