#include "ffi/transport/peer_runner.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <future>
#include <new>
#include <random>
#include <utility>
#include <vector>

#include "ffi/common/testing.h"
#include "ffi/transport/copier.h"

namespace {

// Allocations of this thread before one that fails; negative if none fails.
thread_local int allocations_left = -1;

}  // namespace

void* operator new(size_t size) {
  if (allocations_left >= 0 && allocations_left-- == 0) throw std::bad_alloc();
  void* const memory = std::malloc(std::max<size_t>(size, 1));
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace {

using namespace moe_lb;  // NOLINT: a test

// Ranks with home experts whose every number names the expert, and slots full of rubbish.
struct Machine {
  size_t ranks, home, slots, size;
  size_t participants;
  std::vector<int32_t> wanted, relay;
  std::vector<float> weights, copies;

  Machine(size_t r, size_t l, size_t p, size_t n, size_t devices)
      : ranks(r),
        home(l),
        slots(p),
        size(n),
        participants(devices),
        wanted(r * p, -1),
        relay(r * p, -1),
        weights(r * l * n),
        copies(r * p * n, -7.0f) {
    for (size_t i = 0; i < weights.size(); ++i) weights[i] = static_cast<float>(1 + i / n);
  }

  PeerTable Table() {
    const size_t here = ranks / participants;
    std::vector<PeerShare> shares;
    for (size_t i = 0; i < participants; ++i) {
      PeerShare share;
      share.device = static_cast<int64_t>(i);
      share.wanted = {wanted.data(), ranks, slots};
      share.relay = {relay.data(), ranks, slots};
      share.weights = {home, {size * sizeof(float)}, 64};
      share.home = {reinterpret_cast<std::byte*>(weights.data() + i * here * home * size)};
      share.slots = {reinterpret_cast<std::byte*>(copies.data() + i * here * slots * size)};
      shares.push_back(share);
    }
    return PeerTable(shares);
  }

  void Copy() {
    PeerTable table = Table();
    std::vector<PeerTask> tasks;
    EXPECT(!PlanPeerTasks({wanted.data(), ranks, slots}, {relay.data(), ranks, slots}, table.weights(), &tasks));
    std::promise<void> done;
    EXPECT(!RunPeerTasks(std::move(tasks), table, [&done] { done.set_value(); }));
    done.get_future().wait();
  }

  void Sum() {
    std::promise<void> done;
    EXPECT(!RunPeerSums({wanted.data(), ranks, slots}, {PeerNumber::kF32}, Table(), [&done] { done.set_value(); }));
    done.get_future().wait();
  }

  void Check() const {
    for (size_t i = 0; i < copies.size(); ++i) {
      EXPECT_EQ(copies[i], static_cast<float>(wanted[i / size] + 1));
    }
  }
};

void RandomPlansWithRandomRelays() {
  std::mt19937 random(0);
  const auto draw = [&](size_t below) { return static_cast<size_t>(random() % below); };
  for (int round = 0; round < 100; ++round) {
    const size_t ranks = 1 + draw(8);
    Machine machine(ranks, 1 + draw(3), draw(4), draw(100), draw(2) == 0 ? ranks : 1);
    for (size_t rank = 0; rank < ranks; ++rank) {
      for (size_t slot = 0; slot < machine.slots; ++slot) {
        const size_t at = rank * machine.slots + slot;
        if (draw(4) == 0) continue;
        machine.wanted[at] = static_cast<int32_t>(draw(ranks * machine.home));
        // Lower ranks already holding the expert, which excludes cycles.
        for (size_t lower = 0; lower < rank; ++lower) {
          for (size_t other = 0; other < machine.slots; ++other) {
            const bool holds = machine.wanted[lower * machine.slots + other] == machine.wanted[at];
            if (holds && draw(2) == 0) machine.relay[at] = static_cast<int32_t>(lower);
          }
        }
      }
    }
    machine.Copy();
    machine.Check();
  }
}

void SumsComeHome() {
  Machine machine(4, 2, 2, 50, 4);
  machine.wanted = {3, -1, 3, 0, 0, 3, -1, -1};
  for (size_t i = 0; i < machine.copies.size(); ++i) machine.copies[i] = static_cast<float>(i / machine.size);
  machine.Sum();
  const std::vector<float> expected = {3 + 4, 0, 0, 0 + 2 + 5, 0, 0, 0, 0};
  for (size_t i = 0; i < machine.weights.size(); ++i) EXPECT_EQ(machine.weights[i], expected[i / machine.size]);
}

// The copier of device 0 runs, and the one of device 1 cannot be started: the memory is free at once.
void AMissingCopierStopsAllTasks() {
  Copier* first = nullptr;
  EXPECT(!Copiers::Of(0, &first));
  Machine machine(2, 1, 1, 1000, 2);
  machine.wanted = {1, 0};
  const PeerTable table = machine.Table();
  std::vector<PeerTask> tasks;
  EXPECT(!PlanPeerTasks({machine.wanted.data(), 2, 1}, {machine.relay.data(), 2, 1}, table.weights(), &tasks));
  const auto done = [] { EXPECT(false); };
  {
    const testing::NoThreads none;
    EXPECT(RunPeerTasks(tasks, table, done));
    EXPECT(RunPeerSums({machine.wanted.data(), 2, 1}, {PeerNumber::kF32}, table, done));
  }
  std::promise<void> idle;
  first->Enqueue([&idle] { idle.set_value(); });
  idle.get_future().wait();
  for (const float copy : machine.copies) EXPECT_EQ(copy, -7.0f);
  machine.Copy();
  machine.Check();
}

// Waits until the copiers of the first devices have run their jobs.
void AwaitCopiers(int64_t num_devices) {
  for (int64_t device = 0; device < num_devices; ++device) {
    Copier* copier = nullptr;
    EXPECT(!Copiers::Of(device, &copier));
    std::promise<void> idle;
    copier->Enqueue([&idle] { idle.set_value(); });
    idle.get_future().wait();
  }
}

// Calls `run` with an allocation that fails, for each of its allocations until it succeeds: a call that fails must not
// have started a job, because its memory is free at once.
template <typename Run>
void FailEachAllocation(const Machine& machine, const std::vector<float>& out, Run run) {
  const std::vector<float> before = out;
  for (int count = 0;; ++count) {
    std::promise<void> done;
    const std::function<void()> end = [&done] { done.set_value(); };
    bool failed = false;
    allocations_left = count;
    try {
      EXPECT(!run(end));
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    allocations_left = -1;
    if (!failed) return done.get_future().wait();
    AwaitCopiers(static_cast<int64_t>(machine.participants));
    EXPECT(out == before);
  }
}

void ShortMemoryStopsAllJobsOrNone() {
  Machine machine(4, 1, 2, 100, 4);
  machine.wanted = {1, 2, 2, 3, 3, 0, 0, 1};
  machine.relay[2] = 0;  // rank 1 gets expert 2 from rank 0
  const MatrixView<const int32_t> wanted{machine.wanted.data(), 4, 2};
  const PeerTable table = machine.Table();
  std::vector<PeerTask> tasks;
  EXPECT(!PlanPeerTasks(wanted, {machine.relay.data(), 4, 2}, table.weights(), &tasks));
  FailEachAllocation(machine, machine.copies, [&](const auto& end) { return RunPeerTasks(tasks, table, end); });
  machine.Check();
  FailEachAllocation(machine, machine.weights,
                     [&](const auto& end) { return RunPeerSums(wanted, {PeerNumber::kF32}, table, end); });
  for (size_t i = 0; i < machine.weights.size(); ++i) {
    EXPECT_EQ(machine.weights[i], 2.0f * static_cast<float>(1 + i / machine.size));
  }
}

void TablesMustAgree() {
  Machine a(2, 1, 1, 1, 1), b(2, 1, 1, 1, 1);
  b.wanted[1] = 0;
  std::vector<PeerShare> shares(2);
  shares[0].wanted = {a.wanted.data(), 2, 1};
  shares[1].wanted = {b.wanted.data(), 2, 1};
  EXPECT_EQ(*CheckEqualTables(shares),
            "wanted of rank 1, slot 0 is 0 on rank 1 and -1 on rank 0; expected the same table on all ranks");
}

}  // namespace

int main() {
  AMissingCopierStopsAllTasks();
  ShortMemoryStopsAllJobsOrNone();
  RandomPlansWithRandomRelays();
  SumsComeHome();
  TablesMustAgree();
}
