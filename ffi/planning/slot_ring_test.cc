#include "ffi/planning/slot_ring.h"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <string>
#include <thread>
#include <vector>

#include "ffi/common/testing.h"

namespace {

using moe_lb::SlotRing;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kSoon(20);
constexpr milliseconds kLong(20000);

bool Always(size_t) { return true; }
bool Never(size_t) { return false; }

void SlotsAreHandedOutInOrder() {
  SlotRing ring(3);
  for (size_t take = 0; take < 7; ++take) {
    const auto slot = ring.Reserve(Always, kSoon);
    EXPECT(slot);
    EXPECT_EQ(*slot, take % 3);
    ring.Launch(*slot);
  }
}

void AFullRingGivesUp() {
  SlotRing ring(2);
  ring.Launch(*ring.Reserve(Never, kSoon));
  EXPECT(ring.Reserve(Never, kSoon));  // and is not launched
  const auto start = steady_clock::now();
  EXPECT(!ring.Reserve(Never, kSoon));
  EXPECT(steady_clock::now() - start >= kSoon);
  EXPECT(!ring.Drain(Never, kSoon));
}

void AReservedSlotIsNotPolled() {
  SlotRing ring(1);
  EXPECT(ring.Reserve(Always, kSoon));
  EXPECT(!ring.Reserve(Always, kSoon));
  ring.Launch(0);
  EXPECT(ring.Reserve(Always, kSoon));
}

void ARetiredSlotIsNeverUsedAgain() {
  SlotRing ring(2);
  EXPECT_EQ(*ring.Reserve(Always, kSoon), 0u);
  ring.Retire(0);
  for (int take = 0; take < 3; ++take) {
    EXPECT_EQ(*ring.Reserve(Always, kSoon), 1u);
    ring.Launch(1);
  }
  EXPECT(!ring.Drain(Always, kSoon));
  EXPECT_EQ(*ring.Reserve(Always, kSoon), 1u);
  ring.Retire(1);
  const auto start = steady_clock::now();
  EXPECT(!ring.Reserve(Always, kLong));  // all slots are retired
  EXPECT(steady_clock::now() - start < kLong / 2);
}

void AWaitEndsWhenASlotComesFree() {
  SlotRing ring(1);
  std::atomic<bool> done(false);
  const auto finished = [&](size_t) { return done.load(); };
  ring.Launch(*ring.Reserve(finished, kSoon));
  std::thread device([&] {
    std::this_thread::sleep_for(kSoon);
    done = true;
  });
  EXPECT(ring.Reserve(finished, kLong));
  device.join();
}

// A stream: runs queued functions in order, on a thread of its own, as the driver does.
class Stream {
 public:
  Stream() : thread_([this] { Run(); }) {}

  ~Stream() {
    Queue(nullptr);
    thread_.join();
  }

  void Queue(std::function<void()> work) {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(work));
    more_.notify_one();
  }

 private:
  void Run() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      more_.wait(lock, [this] { return !queue_.empty(); });
      const std::function<void()> work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      if (!work) return;
      work();
    }
  }

  std::mutex mutex_;
  std::condition_variable more_;
  std::deque<std::function<void()>> queue_;
  std::thread thread_;
};

constexpr int kCalls = 400;
constexpr int kThreads = 4;

// The scheduler's use of the ring: copy in, plan, copy out, event. Slots are plain memory, so that the
// thread sanitizer reports a slot used too early, and the values show a lost plan.
void NoSlotIsUsedWhileItsLastCallRuns() {
  SlotRing ring(3);
  std::vector<int> slots(3, 0);
  std::vector<std::atomic<int>> recorded(3), reached(3);  // events: how often recorded, and reached by a stream
  const auto finished = [&](size_t slot) { return reached[slot].load() == recorded[slot].load(); };
  const auto launches = [&](int thread) {
    Stream stream;
    std::vector<int> results(kCalls, -1);
    for (int call = 0; call < kCalls; ++call) {
      const auto slot = ring.Reserve(finished, kLong);
      EXPECT(slot);
      int& memory = slots[*slot];
      stream.Queue([&memory, thread, call] { memory = thread * kCalls + call; });
      stream.Queue([&memory] { memory = 2 * memory; });
      stream.Queue([&memory, &results, call] { results[static_cast<size_t>(call)] = memory; });
      const int event = ++recorded[*slot];
      stream.Queue([&reached, event, slot] { reached[*slot] = event; });
      ring.Launch(*slot);
    }
    EXPECT(ring.Drain(finished, kLong));
    for (int call = 0; call < kCalls; ++call) {
      EXPECT_EQ(results[static_cast<size_t>(call)], 2 * (thread * kCalls + call));
    }
  };
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) threads.emplace_back(launches, thread);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main() {
  SlotsAreHandedOutInOrder();
  AFullRingGivesUp();
  AReservedSlotIsNotPolled();
  ARetiredSlotIsNeverUsedAgain();
  AWaitEndsWhenASlotComesFree();
  NoSlotIsUsedWhileItsLastCallRuns();
}
