#include "ffi/transport/settlers.h"

#include <atomic>
#include <future>
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
      Settlers::OfProcess().Run([=] {
        if (++*num_here == kJobs) all_here->set_value();
        here.wait();
        end->set_value();
      });
    }
    for (auto& end : ends) end.wait();
  }
  EXPECT(Settlers::OfProcess().num_threads() >= 32);
  EXPECT(Settlers::OfProcess().num_threads() <= 64);
}

}  // namespace

int main() { JobsMayWaitForEachOther(); }
