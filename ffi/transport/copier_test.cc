#include "ffi/transport/copier.h"

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "ffi/common/testing.h"

namespace {

using namespace moe_lb;  // NOLINT: a test

void JobsRunInOrderAndBeforeTheEnd() {
  std::vector<int> ran;
  {
    Copier copier;
    for (int i = 0; i < 1000; ++i) copier.Enqueue([&ran, i] { ran.push_back(i); });
  }
  EXPECT_EQ(ran.size(), 1000U);
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(ran[static_cast<size_t>(i)], i);
}

// Its thread sleeps by then.
void AnIdleCopierEnds() {
  Copier copier;
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
}

Copier* CopierOf(int64_t device) {
  Copier* copier = nullptr;
  EXPECT(!Copiers::Of(device, &copier));
  return copier;
}

void ADeviceKeepsItsCopier() {
  Copier* const first = CopierOf(3);
  EXPECT(first == CopierOf(3));
  EXPECT(first != CopierOf(4));
}

void ACopierWithoutAThreadIsAFailure() {
  {
    const testing::NoThreads none;
    Copier* copier = nullptr;
    const Status bad = Copiers::Of(100, &copier);
    EXPECT(bad && bad->is_internal && testing::Has(*bad, "no thread could be started: "));
    EXPECT(CopierOf(3) != nullptr);
  }
  EXPECT(CopierOf(100) != nullptr);
}

// 64 devices, with several threads requesting the copier of each at once.
void ManyThreads() {
  constexpr int kThreads = 8, kDevices = 64, kJobs = 20;
  std::atomic<int> num_ran{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int job = 0; job < kJobs; ++job) {
        for (int device = 0; device < kDevices; ++device) CopierOf(device)->Enqueue([&] { ++num_ran; });
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  while (num_ran < kThreads * kDevices * kJobs) std::this_thread::yield();
}

}  // namespace

int main() {
  JobsRunInOrderAndBeforeTheEnd();
  AnIdleCopierEnds();
  ADeviceKeepsItsCopier();
  ACopierWithoutAThreadIsAFailure();
  ManyThreads();
}
