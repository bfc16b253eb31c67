// Rendezvous of the shards of one program, each on its own thread, at a call site.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <future>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/common/status.h"
#include "ffi/common/view.h"
#include "ffi/transport/settlers.h"
#include "ffi/transport/watchdog.h"

namespace moe_lb {

// Identity of an arriving device.
struct Arrival {
  int64_t run_id;  // one execution of the program, on all devices
  int64_t device;  // ordinal in the process
  int64_t group;   // ranks meet within a group: the groups side by side on a data axis are independent
  int64_t rank;    // in the group
};

// Result of a generation, the same for all of its ranks.
struct Outcome {
  Status failure;
  bool timed_out = false;
};

struct RendezvousOptions {
  std::string site;       // starts every message: "ragged_exchange at dispatch"
  int64_t num_ranks;      // of a group, at least 1
  int64_t num_lanes = 1;  // devices arriving as the same rank of the same group with the same data, at least 1
  std::chrono::duration<double> timeout;  // from the first arrival of a generation, above 0
};

// Returns a failure if an option is out of range, or if the watchdog cannot be started.
Status CheckOptions(const RendezvousOptions& options);

// "SITE: rank 2 of 8 did not arrive within 60 s; missing ranks: 2 5"
std::string MissingMessage(const RendezvousOptions& options, const std::vector<int64_t>& missing);

// Rendezvous of the ranks of a group at one call site. XLA creates one per call site of an executable
// (`State<Rendezvous<...>>`, in the instantiate stage) and passes it to all shards.
//
// The n-th arrival of a device in a run meets the n-th arrivals of the other ranks of its group. The last rank to
// arrive passes the arguments of all to `act`. All ranks get the same outcome, once:
//   - A refused rank (bad arguments) arrives too. All fail with the message of the lowest such rank, and `act` is not
//     called.
//   - After the time-out, the arrived ranks fail. Later arrivals fail at once with the same message.
//   - A device failing before its rank is known fails its run: all waiting ranks of the run, and later arrivals.
// Some programs are partitioned over axes that the call site cannot see (Auto axes beside manual ones). Several devices
// (`num_lanes`) then arrive as the same rank with the same data. Each joins the first lane without its rank, and a
// lane is a generation of its own.
//
// Thread-safe; `Arrive` does not block. A generation is erased when all its ranks have arrived. The last `kMaxFailed`
// failed meetings are kept for late arrivals.
//
// `CallArguments` is movable and default-constructible.
template <typename CallArguments>
class Rendezvous {
 public:
  static constexpr size_t kMaxFailed = 16;

  using Done = std::function<void(const Outcome&)>;
  using Finish = std::function<void(const Status&)>;

  // Action of a generation. `arguments` is in rank order and lives until `finish` is called. Call `finish` once when
  // the action is complete, before `act` returns or later on a thread outside XLA. If `act` throws, the generation
  // fails at once, and XLA reuses the memory of all: it must throw before it starts work on other threads or streams.
  using Act = std::function<void(View<CallArguments> arguments, Finish finish)>;

  // The options must have passed CheckOptions.
  Rendezvous(RendezvousOptions options, Act act)
      : shared_(std::make_shared<Shared>(std::move(options), std::move(act))) {}

  // Returns at once (after `act`, for the last rank). `done` is called exactly once and must not throw. It runs on this
  // thread before Arrive returns, or on its own thread (`Settlers`), so it may complete a promise of XLA. A rank out of
  // range fails alone, because it belongs to no generation.
  void Arrive(const Arrival& who, CallArguments arguments, Status refusal, Done done) {
    shared_->Arrive(who, std::move(arguments), std::move(refusal), std::move(done));
  }

  // Like Arrive, but blocks and returns the outcome.
  Outcome ArriveAndWait(const Arrival& who, CallArguments arguments, Status refusal) {
    // Shared, because `set_value` may still be returning when this thread continues.
    const auto promise = std::make_shared<std::promise<Outcome>>();
    Arrive(who, std::move(arguments), std::move(refusal),
           [promise](const Outcome& outcome) { promise->set_value(outcome); });
    return promise->get_future().get();
  }

  // Fails all incomplete meetings of the run and all later arrivals in it. Call it for a device that fails before its
  // rank and group are known.
  void FailRun(int64_t run_id, const Outcome& outcome) { shared_->FailRun(run_id, outcome); }

  // Number of open meetings; for tests.
  size_t num_open() const;

 private:
  struct Lane;

  // The n-th generation of a group. It is erased when every rank of every lane has arrived and been served.
  struct Generation {
    std::vector<std::shared_ptr<Lane>> lanes;
    int64_t num_over = 0;
  };

  // One group in one run. It is erased when no generation is open: all devices have then arrived equally often, so the
  // next generation can count from 0.
  struct Group {
    std::map<int64_t, int64_t> generation_of_device;
    std::map<int64_t, Generation> generations;
    bool failed = false;
  };
  using Key = std::pair<int64_t, int64_t>;  // run, group

  // One generation.
  struct Lane {
    explicit Lane(size_t num_ranks) : arguments(num_ranks), refusals(num_ranks), here(num_ranks), dones(num_ranks) {}

    Key key;
    std::weak_ptr<Group> group;
    int64_t generation = 0;
    std::vector<CallArguments> arguments;
    std::vector<Status> refusals;
    std::vector<bool> here;
    std::vector<Done> dones;
    size_t num_here = 0;
    Watchdog::Ticket deadline;
    std::optional<Outcome> late;  // set after the time-out
    bool over = false;
    size_t last_rank = 0;           // the last to arrive
    std::thread::id acting_thread;  // while it is in `act`

    bool IsComplete() const { return num_here == here.size(); }
  };

  // Outlives the rendezvous while a generation is open.
  struct Shared : std::enable_shared_from_this<Shared> {
    Shared(RendezvousOptions given_options, Act given_act)
        : options(std::move(given_options)), act(std::move(given_act)) {}

    void Arrive(const Arrival& who, CallArguments arguments, Status refusal, Done done);
    std::shared_ptr<Lane> Join(const Arrival& who);                  // with the lock held
    std::shared_ptr<Lane> Open(const Key& key, int64_t generation);  // with the lock held
    void Meet(const std::shared_ptr<Lane>& lane, size_t last_rank);
    Outcome Settle(const std::vector<Done>& dones, const Outcome& outcome) const;
    void EndLate(const std::shared_ptr<Lane>& lane);
    void End(const std::shared_ptr<Lane>& lane, const Outcome& outcome);
    void Forget(const Lane& lane);    // with the lock held
    void RememberFailed(Lane& lane);  // with the lock held
    void FailRun(int64_t run_id, const Outcome& outcome);
    std::optional<Outcome> FailureOf(int64_t run_id) const;  // with the lock held

    const RendezvousOptions options;
    const Act act;
    mutable std::mutex mutex;
    std::map<Key, std::shared_ptr<Group>> groups;
    std::deque<Key> failed;
    std::deque<std::pair<int64_t, Outcome>> failed_runs;
  };

  const std::shared_ptr<Shared> shared_;
};

// ---- implementation ------------------------------------------------------------

template <typename CallArguments>
void Rendezvous<CallArguments>::Shared::Arrive(const Arrival& who, CallArguments arguments, Status refusal, Done done) {
  if (who.rank < 0 || who.rank >= options.num_ranks) {
    done({Refuse(options.site, ": rank is ", who.rank, "; expected 0 to ", options.num_ranks - 1), false});
    return;
  }
  std::shared_ptr<Lane> lane;
  std::optional<Outcome> late;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    late = FailureOf(who.run_id);
    if (!late) lane = Join(who);
    if (lane != nullptr) late = lane->late;
    if (lane == nullptr) {
      // The run has failed and has no generation left.
    } else if (late) {
      // Late arrivals are counted too: the lane is erased after the last of them.
      if (lane->IsComplete()) Forget(*lane);
    } else {
      const auto rank = static_cast<size_t>(who.rank);
      lane->arguments[rank] = std::move(arguments);
      lane->refusals[rank] = std::move(refusal);
      lane->dones[rank] = std::move(done);
    }
    if (lane != nullptr && !lane->IsComplete()) lane = nullptr;
  }
  // Both calls below run without the lock. `done` may run the rest of a program on this thread, which may arrive here
  // again, and `act` may take as long as the copies.
  if (late) {
    done(*late);
  } else if (lane != nullptr) {
    Meet(lane, static_cast<size_t>(who.rank));
  }
}

template <typename CallArguments>
std::shared_ptr<typename Rendezvous<CallArguments>::Lane> Rendezvous<CallArguments>::Shared::Join(const Arrival& who) {
  const Key key(who.run_id, who.group);
  std::shared_ptr<Group>& group = groups[key];
  if (group == nullptr) group = std::make_shared<Group>();
  // Generations are counted by device and not by rank: with lanes, several devices arrive as the same rank.
  const int64_t generation = group->generation_of_device[who.device]++;
  const auto rank = static_cast<size_t>(who.rank);
  const auto join = [&](const std::shared_ptr<Lane>& lane) {
    lane->here[rank] = true;
    ++lane->num_here;
    return lane;
  };
  for (const std::shared_ptr<Lane>& lane : group->generations[generation].lanes) {
    if (!lane->here[rank]) return join(lane);
  }
  return join(Open(key, generation));
}

template <typename CallArguments>
std::shared_ptr<typename Rendezvous<CallArguments>::Lane> Rendezvous<CallArguments>::Shared::Open(const Key& key,
                                                                                                  int64_t generation) {
  auto lane = std::make_shared<Lane>(static_cast<size_t>(options.num_ranks));
  lane->key = key;
  lane->group = groups[key];
  lane->generation = generation;
  groups[key]->generations[generation].lanes.push_back(lane);
  const auto timeout = std::chrono::duration_cast<Watchdog::Clock::duration>(options.timeout);
  // The watchdog's lock is taken under this one. The watchdog calls back without its own lock, so the order is never
  // reversed.
  lane->deadline = Watchdog::OfProcess().Watch(Watchdog::Clock::now() + timeout,
                                               [self = this->shared_from_this(), lane] { self->EndLate(lane); });
  return lane;
}

template <typename CallArguments>
void Rendezvous<CallArguments>::Shared::Meet(const std::shared_ptr<Lane>& lane, size_t last_rank) {
  // If the deadline has passed, the watchdog is already calling EndLate, which returns because the lane is complete.
  Watchdog::OfProcess().Cancel(lane->deadline);
  {
    const std::lock_guard<std::mutex> lock(mutex);
    lane->last_rank = last_rank;
    // `act` may call `finish` before it returns. End then runs inside Arrive, where `done` may run on this thread.
    lane->acting_thread = std::this_thread::get_id();
  }
  for (const Status& refusal : lane->refusals) {
    if (refusal) return End(lane, {At(options.site, *refusal), false});
  }
  try {
    act({lane->arguments.data(), lane->arguments.size()},
        [self = this->shared_from_this(), lane](const Status& failure) {
          self->End(lane, {failure ? At(self->options.site, *failure) : Ok(), false});
        });
  } catch (const std::exception& error) {
    // `finish` may be called after the exception. The first call of End decides, and the second has no effect.
    End(lane, {At(options.site, Problem(error.what(), true)), false});
  }
  // From here on `finish` is called on another thread, which may reuse the id of this one.
  const std::lock_guard<std::mutex> lock(mutex);
  lane->acting_thread = std::thread::id();
}

template <typename CallArguments>
void Rendezvous<CallArguments>::Shared::EndLate(const std::shared_ptr<Lane>& lane) {
  std::vector<Done> dones;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    // The watchdog and the last rank race under the lock. If the lane is complete here, the deadline has no effect;
    // else the last rank finds `late` set and does not act.
    if (lane->IsComplete() || lane->late) return;
    std::vector<int64_t> missing;
    Status refusal;
    for (size_t rank = 0; rank < lane->here.size(); ++rank) {
      if (!lane->here[rank]) missing.push_back(static_cast<int64_t>(rank));
      if (!refusal && lane->refusals[rank]) refusal = At(options.site, *lane->refusals[rank]);
    }
    // A refusal takes precedence over the missing ranks, which may be missing because they failed too.
    lane->late = refusal ? Outcome{refusal, false} : Outcome{MissingMessage(options, missing), true};
    RememberFailed(*lane);
    dones.swap(lane->dones);
  }
  static_cast<void>(Settle(dones, *lane->late));
}

template <typename CallArguments>
void Rendezvous<CallArguments>::Shared::End(const std::shared_ptr<Lane>& lane, const Outcome& outcome) {
  std::vector<Done> dones;
  Done own;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (lane->over) return;
    lane->over = true;
    dones.swap(lane->dones);
    // The last rank is still in Arrive, so its `done` needs no other thread.
    if (lane->acting_thread == std::this_thread::get_id()) own.swap(dones[lane->last_rank]);
    Forget(*lane);
  }
  const Outcome settled = Settle(dones, outcome);
  if (own) own(settled);
}

// Calls each `done` on a thread of its own. Without these threads all ranks fail, on this one: a failed program runs no
// further operations, which could wait for another rank. Call it without the lock. Returns the outcome of all.
template <typename CallArguments>
Outcome Rendezvous<CallArguments>::Shared::Settle(const std::vector<Done>& dones, const Outcome& outcome) const {
  std::vector<std::function<void()>> jobs;
  for (const Done& done : dones) {
    if (done) jobs.push_back([done, outcome] { done(outcome); });
  }
  const Status bad = Settlers::OfProcess().Run(std::move(jobs));
  if (!bad) return outcome;
  const Outcome failed = outcome.failure ? outcome : Outcome{At(options.site, *bad), false};
  for (const Done& done : dones) {
    if (done) done(failed);
  }
  return failed;
}

template <typename CallArguments>
void Rendezvous<CallArguments>::Shared::Forget(const Lane& lane) {
  const std::shared_ptr<Group> group = lane.group.lock();
  if (group == nullptr) return;
  const auto generation = group->generations.find(lane.generation);
  // Erased already if more devices have arrived as a rank than there are lanes.
  if (generation == group->generations.end()) return;
  if (++generation->second.num_over == options.num_lanes) group->generations.erase(generation);
  // If this group was old, the key may refer to another group.
  const auto found = groups.find(lane.key);
  if (group->generations.empty() && found != groups.end() && found->second == group) groups.erase(found);
}

template <typename CallArguments>
void Rendezvous<CallArguments>::Shared::RememberFailed(Lane& lane) {
  const std::shared_ptr<Group> group = lane.group.lock();
  if (group == nullptr || group->failed) return;
  group->failed = true;
  failed.push_back(lane.key);
  // Even later arrivals open a new generation and fail after its time-out. In return, memory does not grow with the
  // number of failures.
  if (failed.size() > kMaxFailed) {
    groups.erase(failed.front());
    failed.pop_front();
  }
}

template <typename CallArguments>
std::optional<Outcome> Rendezvous<CallArguments>::Shared::FailureOf(int64_t run_id) const {
  for (const auto& [run, outcome] : failed_runs) {
    if (run == run_id) return outcome;
  }
  return std::nullopt;
}

template <typename CallArguments>
void Rendezvous<CallArguments>::Shared::FailRun(int64_t run_id, const Outcome& outcome) {
  const Outcome failure = {At(options.site, *outcome.failure), outcome.timed_out};
  std::vector<Watchdog::Ticket> deadlines;
  std::vector<Done> dones;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    // Keep the first failure: it causes the later ones.
    if (FailureOf(run_id)) return;
    failed_runs.emplace_back(run_id, failure);
    if (failed_runs.size() > kMaxFailed) failed_runs.pop_front();
    for (auto group = groups.begin(); group != groups.end();) {
      if (group->first.first != run_id) {
        ++group;
        continue;
      }
      for (const auto& [number, generation] : group->second->generations) {
        for (const std::shared_ptr<Lane>& lane : generation.lanes) {
          // A complete lane is acting and ends by itself.
          if (lane->IsComplete() || lane->late) continue;
          lane->late = failure;
          deadlines.push_back(lane->deadline);
          std::move(lane->dones.begin(), lane->dones.end(), std::back_inserter(dones));
        }
      }
      group = groups.erase(group);
    }
  }
  static_cast<void>(Settle(dones, failure));
  // Cancel without the lock: the deadline may own the last reference to a generation.
  for (const Watchdog::Ticket& deadline : deadlines) Watchdog::OfProcess().Cancel(deadline);
}

template <typename CallArguments>
size_t Rendezvous<CallArguments>::num_open() const {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  size_t count = 0;
  for (const auto& [key, group] : shared_->groups) count += group->generations.size();
  return count;
}

}  // namespace moe_lb
