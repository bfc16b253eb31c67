#include "ffi/transport/settlers.h"

#include <atomic>
#include <chrono>
#include <future>
#include <thread>
#include <vector>

#include "ffi/common/testing.h"

namespace {

using moe_lb::Settlers;

// Every job waits for all others, so each needs a thread of its own.
void JobsMayWaitForEachOther() {
  for (int round = 0; round < 20; ++round) {
    constexpr int kJobs = 32;
    auto all_here = std::make_shared<std::promise<void>>();
    const std::shared_future<void> here = all_here->get_future().share();
    auto num_here = std::make_shared<std::atomic<int>>(0);
    std::vector<std::future<void>> ends;
    for (int i = 0; i < kJobs; ++i) {
      auto end = std::make_shared<std::promise<void>>();
      ends.push_back(end->get_future());
      EXPECT(!Settlers::OfProcess().Run({[=] {
        if (++*num_here == kJobs) all_here->set_value();
        here.wait();
        end->set_value();
      }}));
    }
    for (auto& end : ends) end.wait();
  }
  EXPECT(Settlers::OfProcess().num_threads() >= 32);
  EXPECT(Settlers::OfProcess().num_threads() <= 64);
}

// One job after the other uses one thread, which ends when it is idle.
void AnIdleThreadIsUsedAndEnds() {
  using std::chrono::milliseconds;
  // Never destroyed, because its threads are detached.
  static auto* const settlers = new Settlers(milliseconds(500));
  for (int job = 0; job < 3; ++job) {
    std::promise<void> end;
    EXPECT(!settlers->Run({[&] { end.set_value(); }}));
    end.get_future().get();
    std::this_thread::sleep_for(milliseconds(100));
    EXPECT_EQ(settlers->num_threads(), 1u);
  }
  for (int wait = 0; wait < 500 && settlers->num_threads() > 0; ++wait) std::this_thread::sleep_for(milliseconds(10));
  EXPECT_EQ(settlers->num_threads(), 0u);
}

void WithoutThreadsNoJobRuns() {
  static auto* const settlers = new Settlers(std::chrono::milliseconds(500));
  {
    const moe_lb::testing::NoThreads none;
    const moe_lb::Status bad = settlers->Run({[] { EXPECT(false); }});
    EXPECT(bad && bad->is_internal && moe_lb::testing::Has(*bad, "no thread could be started: "));
    EXPECT_EQ(settlers->num_threads(), 0u);
  }
  std::promise<void> end;
  EXPECT(!settlers->Run({[&] { end.set_value(); }}));
  end.get_future().get();
}

}  // namespace

int main() {
  JobsMayWaitForEachOther();
  AnIdleThreadIsUsedAndEnds();
  WithoutThreadsNoJobRuns();
}
