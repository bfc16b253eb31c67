#include "ffi/transport/rendezvous.h"

#include <atomic>
#include <functional>
#include <numeric>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/common/testing.h"
#include "ffi/transport/copier.h"

namespace {

using namespace moe_lb;  // NOLINT: a test

// Arguments of a rank: a number, and the address of the sum.
struct Number {
  int64_t value = 0;
  int64_t* sum = nullptr;
};

using NumberRendezvous = Rendezvous<Number>;

void Sum(View<Number> arguments, const NumberRendezvous::Finish& finish) {
  int64_t sum = 0;
  for (const Number& number : arguments) sum += number.value;
  for (const Number& number : arguments) *number.sum = sum;
  finish(Ok());
}

void OnCopier(int64_t device, std::function<void()> job) {
  Copier* copier = nullptr;
  EXPECT(!Copiers::Of(device, &copier));
  copier->Enqueue(std::move(job));
}

// The same on another thread.
void SumLater(View<Number> arguments, const NumberRendezvous::Finish& finish) {
  OnCopier(0, [arguments, finish] { Sum(arguments, finish); });
}

RendezvousOptions Options(int64_t num_ranks, double timeout_s = 60, int64_t num_lanes = 1) {
  return {"rendezvous", num_ranks, num_lanes, std::chrono::duration<double>(timeout_s)};
}

// Runs `body(thread)` on separate threads.
template <typename Body>
void OnThreads(int64_t num_threads, const Body& body) {
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < num_threads; ++i) threads.emplace_back([i, &body] { body(i); });
  for (std::thread& thread : threads) thread.join();
}

void MaybePause(std::minstd_rand& random) {
  if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
}

// Every device is a thread; groups side by side; several runs and generations; each rendezvous's sum is checked.
void EveryGenerationMeetsItsOwn(int64_t num_threads, int64_t num_ranks, int64_t num_generations,
                                NumberRendezvous::Act act) {
  NumberRendezvous rendezvous(Options(num_ranks), std::move(act));
  OnThreads(num_threads, [&](int64_t device) {
    std::minstd_rand random(static_cast<unsigned>(device) + 1);
    const int64_t group = device / num_ranks, rank = device % num_ranks;
    for (int64_t run = 0; run < 3; ++run) {
      for (int64_t generation = 0; generation < num_generations; ++generation) {
        MaybePause(random);
        int64_t sum = 0;
        const int64_t value = run * 1000000 + generation * 1000 + group;
        const Outcome outcome = rendezvous.ArriveAndWait({run, device, group, rank}, {value, &sum}, Ok());
        EXPECT(!outcome.failure);
        EXPECT_EQ(sum, num_ranks * value);
      }
    }
  });
  EXPECT_EQ(rendezvous.num_open(), 0U);
}

// Two concurrent runs, with arrivals that do not block.
void NoThreadWaitsInArrive() {
  constexpr int64_t kRanks = 4, kRuns = 50;
  NumberRendezvous rendezvous(Options(kRanks), SumLater);
  std::vector<int64_t> sums(kRanks * kRuns);
  std::atomic<int64_t> num_done{0};
  OnThreads(kRanks, [&](int64_t rank) {
    for (int64_t i = 0; i < kRuns; ++i) {
      const int64_t run = rank % 2 == 0 ? i : kRuns - 1 - i;  // in opposite orders
      rendezvous.Arrive({run, rank, 0, rank}, {run, &sums[static_cast<size_t>(run * kRanks + rank)]}, Ok(),
                        [&](const Outcome& outcome) {
                          EXPECT(!outcome.failure);
                          ++num_done;
                        });
    }
  });
  while (num_done < kRanks * kRuns) std::this_thread::yield();
  for (int64_t i = 0; i < kRanks * kRuns; ++i) EXPECT_EQ(sums[static_cast<size_t>(i)], kRanks * (i / kRanks));
  EXPECT_EQ(rendezvous.num_open(), 0U);
}

// The last rank must not run the callbacks of the others: XLA would run their programs on its thread.
void OthersAreCalledBackOnAThreadOfTheirOwn() {
  NumberRendezvous rendezvous(Options(2), Sum);
  int64_t sum = 0;
  std::promise<std::thread::id> first, second;
  rendezvous.Arrive({0, 0, 0, 0}, {1, &sum}, Ok(),
                    [&](const Outcome&) { first.set_value(std::this_thread::get_id()); });
  rendezvous.Arrive({0, 1, 0, 1}, {1, &sum}, Ok(),
                    [&](const Outcome&) { second.set_value(std::this_thread::get_id()); });
  EXPECT(first.get_future().get() != std::this_thread::get_id());
  EXPECT(second.get_future().get() == std::this_thread::get_id());
}

// A loop in which each arrival comes from the previous callback: recursion depth and memory must stay constant.
void ALongChainStaysFlat() {
  constexpr int64_t kGenerations = 10000;
  NumberRendezvous rendezvous(Options(2), Sum);
  int64_t sums[2] = {0, 0};
  std::promise<void> over[2];
  std::function<void(int64_t, int64_t)> next = [&](int64_t rank, int64_t generation) {
    if (generation == kGenerations) return over[rank].set_value();
    rendezvous.Arrive({7, rank, 0, rank}, {generation, &sums[rank]}, Ok(),
                      [&next, &sums, rank, generation](const Outcome& outcome) {
                        EXPECT(!outcome.failure);
                        EXPECT_EQ(sums[rank], 2 * generation);
                        // As XLA does: never deeper than one callback.
                        OnCopier(rank, [&next, rank, generation] { next(rank, generation + 1); });
                      });
  };
  OnCopier(0, [&] { next(0, 0); });
  OnCopier(1, [&] { next(1, 0); });
  over[0].get_future().get();
  over[1].get_future().get();
  EXPECT_EQ(rendezvous.num_open(), 0U);
}

// Without threads to call back, all ranks fail, those whose copies are done too; and with a late or a failed
// generation.
void WithoutThreadsAllFail() {
  NumberRendezvous rendezvous(Options(2, 0.2), Sum);
  const testing::NoThreads none;
  int64_t sum = 0;
  std::vector<Outcome> outcomes;
  const auto arrive = [&](int64_t run, int64_t rank) {
    rendezvous.Arrive({run, rank, 0, rank}, {1, &sum}, Ok(), [&](const Outcome& outcome) {
      EXPECT(outcome.failure);
      outcomes.push_back(outcome);
    });
  };
  arrive(0, 0);
  arrive(0, 1);
  EXPECT_EQ(outcomes.size(), 2u);
  for (const Outcome& outcome : outcomes) {
    EXPECT(testing::Has(*outcome.failure, "rendezvous: no thread could be started: "));
  }
  arrive(1, 0);
  rendezvous.FailRun(1, {Refuse("refused"), false});
  EXPECT_EQ(*outcomes.at(2).failure, std::string("rendezvous: refused"));
  // On the watchdog's thread, which then has no thread to give it to.
  std::promise<void> late;
  rendezvous.Arrive({2, 0, 0, 0}, {1, &sum}, Ok(), [&](const Outcome& outcome) {
    EXPECT(outcome.timed_out);
    late.set_value();
  });
  late.get_future().get();
}

void OneRefusalFailsAll(int64_t num_ranks) {
  NumberRendezvous rendezvous(Options(num_ranks), [](View<Number>, const NumberRendezvous::Finish&) { EXPECT(false); });
  for (int64_t run = 0; run < 20; ++run) {
    OnThreads(num_ranks, [&](int64_t rank) {
      const Status refusal = rank > 0 && rank % 3 == 0 ? Refuse("size of rank ", rank, " is -1") : Ok();
      const Outcome outcome = rendezvous.ArriveAndWait({run, rank, 0, rank}, {}, refusal);
      EXPECT_EQ(outcome.failure.value_or("none"), "rendezvous: size of rank 3 is -1");
      EXPECT(!outcome.timed_out);
    });
  }
  EXPECT_EQ(rendezvous.num_open(), 0U);
}

void WhatFailsInActFailsAll() {
  const auto outcome_of = [](NumberRendezvous::Act act) {
    NumberRendezvous rendezvous(Options(1), std::move(act));
    return rendezvous.ArriveAndWait({0, 0, 0, 0}, {}, Ok()).failure.value_or("none");
  };
  const auto refused =
      outcome_of([](View<Number>, const NumberRendezvous::Finish& finish) { finish(Refuse("too few rows")); });
  const auto thrown =
      outcome_of([](View<Number>, const NumberRendezvous::Finish&) { throw std::runtime_error("no memory"); });
  EXPECT_EQ(refused, "rendezvous: too few rows");
  EXPECT_EQ(thrown, "rendezvous: no memory");
  EXPECT(thrown.is_internal && !refused.is_internal);
}

void WhoIsMissingIsNamed() {
  // The other threads must start within this time, on a loaded machine, too.
  NumberRendezvous rendezvous(Options(8, 1.0), Sum);
  const std::string want = "rendezvous: rank 2 of 8 did not arrive within 1 s; missing ranks: 2 5";
  int64_t sum = 0;
  OnThreads(8, [&](int64_t rank) {
    if (rank == 2 || rank == 5) return;
    const Outcome outcome = rendezvous.ArriveAndWait({0, rank, 0, rank}, {0, &sum}, Ok());
    EXPECT_EQ(outcome.failure.value_or("none"), want);
    EXPECT(outcome.timed_out);
  });
  // A late rank does not wait.
  for (const int64_t rank : {2, 5}) {
    const Outcome outcome = rendezvous.ArriveAndWait({0, rank, 0, rank}, {0, &sum}, Ok());
    EXPECT_EQ(outcome.failure.value_or("none"), want);
  }
  EXPECT_EQ(rendezvous.num_open(), 0U);
}

// Ranks arrive near the time-out: all must get the same outcome, and the next run is unaffected.
void ArrivingAtTheDeadline() {
  constexpr int64_t kRanks = 8;
  NumberRendezvous rendezvous(Options(kRanks, 0.002), SumLater);
  for (int64_t run = 0; run < 100; ++run) {
    std::atomic<int64_t> num_failed{0};
    std::vector<int64_t> sums(kRanks);
    OnThreads(kRanks, [&](int64_t rank) {
      std::minstd_rand random(static_cast<unsigned>(run * kRanks + rank + 1));
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 2500));
      const Outcome outcome =
          rendezvous.ArriveAndWait({run, rank, 0, rank}, {1, &sums[static_cast<size_t>(rank)]}, Ok());
      if (outcome.failure) ++num_failed;
    });
    EXPECT(num_failed == 0 || num_failed == kRanks);
  }
  EXPECT_EQ(rendezvous.num_open(), 0U);
}

// Runs with missing ranks must not accumulate.
void FailedMeetingsAreForgotten() {
  NumberRendezvous rendezvous(Options(2, 1e-4), Sum);
  int64_t sum = 0;
  for (int64_t run = 0; run < 200; ++run) {
    EXPECT(rendezvous.ArriveAndWait({run, 0, 0, 0}, {0, &sum}, Ok()).timed_out);
  }
  EXPECT_EQ(rendezvous.num_open(), NumberRendezvous::kMaxFailed);
}

// Late arrivals in the last failed runs end at once.
void TheLastFailedRunsAreKept() {
  constexpr auto kRuns = static_cast<int64_t>(NumberRendezvous::kMaxFailed);
  NumberRendezvous rendezvous(Options(2, 1e-3), Sum);
  const Outcome lost = {Status(Problem("a device is lost", true)), false};
  for (int64_t run = 0; run <= kRuns; ++run) rendezvous.FailRun(run, lost);
  int64_t sum = 0;
  for (int64_t run = 0; run <= kRuns; ++run) {
    EXPECT_EQ(rendezvous.ArriveAndWait({run, 0, 0, 0}, {0, &sum}, Ok()).timed_out, run == 0);
  }
}

// A generation whose action has begun ends with the action's outcome.
void AFailedRunDoesNotEndActiveGenerations() {
  NumberRendezvous::Finish finish;
  NumberRendezvous rendezvous(Options(1), [&](View<Number>, const NumberRendezvous::Finish& given) { finish = given; });
  std::promise<Outcome> ended;
  rendezvous.Arrive({7, 0, 0, 0}, {}, Ok(), [&](const Outcome& outcome) { ended.set_value(outcome); });
  rendezvous.FailRun(7, {Status(Problem("a device is lost", true)), false});
  finish(Ok());
  EXPECT(!ended.get_future().get().failure);
}

// Two devices arrive as each rank, in any order.
void LanesAreFilledInOrder() {
  constexpr int64_t kRanks = 4, kLanes = 2;
  NumberRendezvous rendezvous(Options(kRanks, 60, kLanes), Sum);
  OnThreads(kRanks * kLanes, [&](int64_t device) {
    std::minstd_rand random(static_cast<unsigned>(device) + 1);
    for (int64_t generation = 0; generation < 200; ++generation) {
      MaybePause(random);
      int64_t sum = 0;
      EXPECT(!rendezvous.ArriveAndWait({0, device, 0, device % kRanks}, {generation, &sum}, Ok()).failure);
      EXPECT_EQ(sum, kRanks * generation);
    }
  });
  EXPECT_EQ(rendezvous.num_open(), 0U);
}

// More devices than lanes arrive as a rank at once, with wrong attributes.
void SurplusDevicesEndToo() {
  std::vector<NumberRendezvous::Finish> ends;
  NumberRendezvous rendezvous(Options(2), [&](View<Number>, NumberRendezvous::Finish end) { ends.push_back(end); });
  std::atomic<int> num_done{0};
  // The last two keep the group after its first generation.
  for (const int64_t device : {0, 1, 2, 3, 0, 1}) {
    if (ends.size() == 2 && device == 1) {
      ends[0](Ok());
      ends[1](Ok());
    }
    rendezvous.Arrive({0, device, 0, device % 2}, {}, Ok(), [&](const Outcome& outcome) {
      EXPECT(!outcome.failure);
      ++num_done;
    });
  }
  ends[2](Ok());
  while (num_done < 6) std::this_thread::yield();
  EXPECT_EQ(rendezvous.num_open(), 0U);
}

void BadArgumentsAreNamed() {
  NumberRendezvous rendezvous(Options(2), Sum);
  EXPECT_EQ(rendezvous.ArriveAndWait({0, 0, 0, 2}, {}, Ok()).failure.value_or("none"),
            "rendezvous: rank is 2; expected 0 to 1");
  EXPECT_EQ(CheckOptions(Options(0)).value_or("none"), "num_ranks is 0; expected at least 1");
  EXPECT_EQ(CheckOptions(Options(1, 1, 0)).value_or("none"), "num_lanes is 0; expected at least 1");
  EXPECT_EQ(CheckOptions(Options(1, -1)).value_or("none"), "timeout_s is -1; expected above 0 and at most 1e6");
  EXPECT_EQ(CheckOptions(Options(1, 0)).value_or("none"), "timeout_s is 0; expected above 0 and at most 1e6");
  EXPECT_EQ(CheckOptions(Options(65537)).value_or("none"), "num_ranks is 65537; expected at most 65536");
  EXPECT_EQ(CheckOptions(Options(1, 1, 65537)).value_or("none"), "num_lanes is 65537; expected at most 65536");
  EXPECT(!CheckOptions(Options(1)));
  EXPECT(!CheckOptions(Options(65536, 1e6, 65536)));
}

// A device without a known rank fails its run for the others at once, and no other run.
void AFailedRunEndsForAll() {
  for (const bool first : {false, true}) {
    NumberRendezvous rendezvous(Options(3), Sum);
    std::vector<Outcome> outcomes(3);
    std::vector<int64_t> sums(3);
    std::atomic<int> waiting{0};
    const auto began = std::chrono::steady_clock::now();
    OnThreads(3, [&](int64_t rank) {
      const auto at = static_cast<size_t>(rank);
      if (rank == 2) {
        while (!first && waiting < 2) std::this_thread::yield();
        rendezvous.FailRun(7, {Status(Problem("a device is lost", true)), false});
      }
      if (first) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      ++waiting;
      // Another group of the run fails too, because the group of the device is unknown.
      outcomes[at] = rendezvous.ArriveAndWait({7, rank, rank % 2, rank}, {rank, &sums[at]}, Ok());
    });
    EXPECT(std::chrono::steady_clock::now() - began < std::chrono::seconds(20));
    for (const Outcome& outcome : outcomes) {
      EXPECT(outcome.failure == Status("rendezvous: a device is lost"));
      EXPECT(outcome.failure->is_internal);
    }
    EXPECT_EQ(rendezvous.num_open(), 0u);
    OnThreads(3, [&](int64_t rank) {
      const auto at = static_cast<size_t>(rank);
      const Outcome outcome = rendezvous.ArriveAndWait({8, rank, 0, rank}, {rank, &sums[at]}, Ok());
      EXPECT(!outcome.failure);
      EXPECT_EQ(sums[at], 3);
    });
  }
}

}  // namespace

int main() {
  // First: no thread is idle.
  EXPECT(!CheckOptions(Options(2)));
  WithoutThreadsAllFail();
  AFailedRunEndsForAll();
  EveryGenerationMeetsItsOwn(8, 8, 200, Sum);
  EveryGenerationMeetsItsOwn(8, 2, 200, SumLater);
  EveryGenerationMeetsItsOwn(128, 128, 10, Sum);
  EveryGenerationMeetsItsOwn(128, 32, 10, SumLater);
  NoThreadWaitsInArrive();
  OthersAreCalledBackOnAThreadOfTheirOwn();
  ALongChainStaysFlat();
  OneRefusalFailsAll(8);
  OneRefusalFailsAll(128);
  WhatFailsInActFailsAll();
  WhoIsMissingIsNamed();
  ArrivingAtTheDeadline();
  FailedMeetingsAreForgotten();
  TheLastFailedRunsAreKept();
  AFailedRunDoesNotEndActiveGenerations();
  LanesAreFilledInOrder();
  SurplusDevicesEndToo();
  BadArgumentsAreNamed();
}
