#include "ffi/transport/process_group_cuda.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <thread>
#include <utility>

namespace moe_lb {
namespace {

using Clock = std::chrono::steady_clock;

// Value of a released word, ahead of every call in flight: counters wrap around, see HasReached.
constexpr uint32_t kBeyond = 1u << 30;

uint64_t IdOf(const std::vector<int64_t>& processes) {
  uint64_t id = 14695981039346656037u;
  for (const int64_t process : processes) id = (id ^ static_cast<uint64_t>(process)) * 1099511628211u;
  return id;
}

// The failure that a process has published in its page.
Outcome ShownFailure(const SharedCall& call) {
  return {Problem(call.message, call.is_internal != 0), call.timed_out != 0};
}

}  // namespace

Outcome ProcessGroup::Of(Neighbours* neighbours, const std::vector<int64_t>& processes, const std::string& site,
                         double timeout_s, ProcessGroup** group) {
  static std::mutex mutex;
  static auto* const all = new std::map<std::vector<int64_t>, ProcessGroup*>;
  const std::lock_guard<std::mutex> lock(mutex);
  ProcessGroup*& found = (*all)[processes];
  if (found == nullptr) {
    if (std::count(processes.begin(), processes.end(), neighbours->own()) != 1) {
      return {
          Refuse(site, ": processes do not name process ", neighbours->own(), " once; expected the one that runs this"),
          false};
    }
    auto fresh = std::unique_ptr<ProcessGroup>(new ProcessGroup(neighbours, processes));
    if (Status bad = fresh->MakePage()) return {At(site, *bad), false};
    // Kept also after a failure below: some processes may have mapped the page.
    found = fresh.release();
  }
  *group = found;
  return found->SendPage(site, timeout_s);
}

ProcessGroup::ProcessGroup(Neighbours* neighbours, const std::vector<int64_t>& processes)
    : neighbours_(neighbours),
      processes_(processes),
      id_(IdOf(processes)),
      own_(static_cast<size_t>(std::find(processes.begin(), processes.end(), neighbours->own()) - processes.begin())),
      pages_(processes.size(), nullptr),
      released_(processes.size(), false),
      has_page_(processes.size(), false) {}

Status ProcessGroup::MakePage() {
  if (Status bad = MakeSharedMemory(sizeof(SharedCalls), &memory_)) return bad;
  void* mapped = nullptr;
  if (Status bad = MapSharedMemory(memory_, sizeof(SharedCalls), &mapped)) return bad;
  pages_[own_] = static_cast<SharedCalls*>(mapped);
  // As if calls 0 to kNum - 1 were complete. All other words are 0.
  uint32_t number = 0;
  for (SharedCall& one : pages_[own_]->calls) one.copied = number++;
  return Ok();
}

Outcome ProcessGroup::SendPage(const std::string& site, double timeout_s) {
  PeerNote note;
  note.kind = PeerNote::kPage;
  note.id = id_;
  for (size_t rank = 0; rank < size(); ++rank) {
    if (rank == own_ || has_page_[rank]) continue;
    const SocketResult sent = neighbours_->Send(processes_[rank], note, memory_.get(), timeout_s);
    // Not an error here: WaitForPages finds the first process to end, if all others send their pages before.
    if (sent.problem && sent.outcome != SocketOutcome::kEnded) return Unsent(site, sent);
    has_page_[rank] = true;
  }
  return {};
}

Outcome ProcessGroup::WaitForPages(const std::string& site, double timeout_s) {
  const std::lock_guard<std::mutex> lock(waiting_);
  if (std::count(pages_.begin(), pages_.end(), nullptr) == 0) return {};
  for (size_t rank = 0; rank < size(); ++rank) {
    if (pages_[rank] != nullptr) continue;
    PeerNote note;
    Descriptor memory;
    const auto has_come = [&] { return neighbours_->Take(processes_[rank], PeerNote::kPage, id_, &note, &memory); };
    if (const Outcome outcome = Until(site, "come", timeout_s, rank, has_come); outcome.failure) return outcome;
    void* mapped = nullptr;
    if (Status bad = MapSharedMemory(memory, sizeof(SharedCalls), &mapped)) return {At(site, *bad), false};
    const std::lock_guard<std::mutex> release(mutex_);
    pages_[rank] = static_cast<SharedCalls*>(mapped);
  }
  // The pages do not change from here on.
  neighbours_->OnEnd([this](int64_t process) { Release(process); });
  return {};
}

Outcome ProcessGroup::WaitForRing(const std::string& site, uint32_t number, double timeout_s) const {
  for (size_t rank = 0; rank < size(); ++rank) {
    // Hosts and streams read the entry until then, and this process's own streams still write it.
    const auto is_free = [&] {
      return HasReached(call(rank, number).copied.load(std::memory_order_acquire), number - SharedCalls::kNum);
    };
    const Outcome outcome = Until(site, "ring", timeout_s, rank, is_free);
    if (outcome.failure) return outcome;
  }
  return {};
}

void ProcessGroup::Announce(uint32_t number, const Announcement& announcement) const {
  SharedCall& mine = call(own_, number);
  mine.queued.store(0, std::memory_order_relaxed);
  mine.forwarded.store(0, std::memory_order_relaxed);
  mine.request_hash = announcement.request_hash;
  std::copy(announcement.home.begin(), announcement.home.end(), mine.home);
  std::copy(announcement.slots.begin(), announcement.slots.end(), mine.slots);
  pages_[own_]->last_failed.store(0, std::memory_order_relaxed);
  mine.announced.store(number);
}

Outcome ProcessGroup::WaitForAll(const std::string& site, uint32_t number, double timeout_s) const {
  for (size_t rank = 0; rank < size(); ++rank) {
    const SharedCall& other = call(rank, number);
    const auto has_come = [&] {
      return other.failed.load(std::memory_order_acquire) == number ||
             other.announced.load(std::memory_order_acquire) == number;
    };
    const Outcome outcome = Until(site, "all", timeout_s, rank, has_come);
    if (outcome.failure) return outcome;
    // Sequentially consistent with `announced` on all processes: see ShowFailure.
    if (other.failed.load() == number) {
      return ShownFailure(other);
    }
    if (other.request_hash == call(own_, number).request_hash) continue;
    return {Refuse(site, ": rank ", rank, " requests other copies than rank ", own_,
                   "; expected the same calls in the same order, with the same tables and sizes of weights"),
            false};
  }
  return {};
}

Outcome ProcessGroup::WaitForQueued(const std::string& site, uint32_t number, size_t rank, size_t task,
                                    double timeout_s) const {
  const SharedCall& other = call(rank, number);
  const auto is_queued = [&] {
    return other.queued.load(std::memory_order_acquire) > task ||
           other.failed.load(std::memory_order_acquire) == number;
  };
  const Outcome outcome = Until(site, "queued", timeout_s, rank, is_queued);
  if (outcome.failure || other.failed.load(std::memory_order_acquire) != number) return outcome;
  return ShownFailure(other);
}

void ProcessGroup::ShowQueued(uint32_t number, size_t tasks) const {
  call(own_, number).queued.store(static_cast<uint32_t>(tasks), std::memory_order_release);
}

std::vector<size_t> ProcessGroup::ShowFailure(uint32_t number, const Outcome& outcome) const {
  SharedCall& mine = call(own_, number);
  std::strncpy(mine.message, outcome.failure->c_str(), SharedCall::kMaxMessage - 1);
  mine.message[SharedCall::kMaxMessage - 1] = 0;
  mine.timed_out = outcome.timed_out;
  mine.is_internal = outcome.failure->is_internal;
  mine.failed.store(number);
  pages_[own_]->last_failed.store(number, std::memory_order_release);
  // A process announcing after this store reads the failure.
  std::vector<size_t> others;
  for (size_t rank = 0; rank < size(); ++rank) {
    if (rank != own_ && call(rank, number).announced.load() == number) others.push_back(rank);
  }
  return others;
}

void ProcessGroup::ShowCopied(uint32_t number) const {
  call(own_, number).copied.store(number, std::memory_order_release);
}

Outcome ProcessGroup::WhyReleased(const std::string& site, uint32_t number) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [broken, rank] : broken_) {
    if (broken == number) return Ended(site, rank);
  }
  return {};
}

// Called on the watching thread of the sockets. Only words of the ended process are written: it has only read the
// memory of others.
void ProcessGroup::Release(int64_t process) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const size_t rank = RankOf(process);
  if (rank == size() || rank == own_ || released_[rank]) return;
  released_[rank] = true;
  static_cast<void>(FirstEnded(rank));
  const uint32_t next = next_;
  for (uint32_t number = next - SharedCalls::kNum; number != next; ++number) {
    SharedCall& other = call(rank, number);
    // A process with its part complete, as at the end of a program, breaks no call.
    if (HasReached(other.copied.load(std::memory_order_acquire), number)) continue;
    broken_.emplace_back(number, rank);
  }
  for (SharedCall& other : pages_[rank]->calls) {
    other.forwarded.store(kBeyond, std::memory_order_release);
    other.copied.store(next + kBeyond, std::memory_order_release);
  }
}

size_t ProcessGroup::RankOf(int64_t process) const {
  return static_cast<size_t>(std::find(processes_.begin(), processes_.end(), process) - processes_.begin());
}

// The first process to end is the cause; later ones may have ended because of it. Several ends may be detected at once,
// in any order, but a process that ended because of another one has named it in its page.
size_t ProcessGroup::FirstEnded(size_t rank) const {
  size_t first = SIZE_MAX;
  if (!first_ended_.compare_exchange_strong(first, rank)) rank = first;
  for (size_t hop = 0; hop < size() && pages_[rank] != nullptr; ++hop) {
    const uint32_t named = pages_[rank]->first_ended.load(std::memory_order_acquire);
    if (named == 0 || named - 1 == own_) break;
    rank = named - 1;
  }
  pages_[own_]->first_ended.store(static_cast<uint32_t>(rank + 1), std::memory_order_release);
  return rank;
}

Outcome ProcessGroup::Ended(const std::string& site, size_t rank) const {
  const auto name = [&] { return site + ": rank " + std::to_string(rank) + " of " + std::to_string(size()); };
  const SocketResult end = neighbours_->WhyGone(processes_[rank]);
  if (end.outcome == SocketOutcome::kBroken)
    return {Problem(name() + " cannot be reached: " + *end.problem, true), false};
  rank = FirstEnded(rank);
  // A process ends after a failed call, with the reason in its page.
  const uint32_t failed = pages_[rank] == nullptr ? 0 : pages_[rank]->last_failed.load(std::memory_order_acquire);
  if (failed != 0) return ShownFailure(call(rank, failed));
  return {Problem(name() + " has ended (process " + std::to_string(processes_[rank]) +
                      "); expected all to run until the program ends",
                  true),
          false};
}

Outcome ProcessGroup::Unsent(const std::string& site, const SocketResult& sent) const {
  if (sent.outcome == SocketOutcome::kEnded) return Ended(site, RankOf(sent.process));
  return {At(site, *sent.problem), sent.outcome == SocketOutcome::kStalled};
}

Outcome ProcessGroup::Until(const std::string& site, const char* what, double timeout_s, size_t rank,
                            const std::function<bool()>& is_so) const {
  if (left_out_ == what) return {};
  const Clock::time_point begin = Clock::now();
  for (;;) {
    // Test for the end first: words written before the end are valid.
    const bool is_gone = neighbours_->IsGone(processes_[rank]);
    if (is_so()) return {};
    if (is_gone) return Ended(site, rank);
    const Clock::duration waited = Clock::now() - begin;
    if (std::chrono::duration<double>(waited).count() > timeout_s) {
      return {Refuse(site, ": rank ", rank, " of ", size(), " did not arrive within ", timeout_s, " s (process ",
                     processes_[rank], ")"),
              true};
    }
    // The others usually arrive within microseconds.
    if (waited < std::chrono::microseconds(200)) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
}

}  // namespace moe_lb
