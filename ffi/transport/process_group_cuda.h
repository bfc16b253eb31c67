// Host-side rendezvous of processes of one machine, one GPU each, copying from each other.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "ffi/transport/neighbours_cuda.h"
#include "ffi/transport/rendezvous.h"
#include "ffi/transport/shared_calls.h"

namespace moe_lb {

// Announcement of one call by one rank.
struct Announcement {
  uint64_t request_hash = 0;
  std::vector<SharedArray> home;
  std::vector<SharedArray> slots;
};

// Every process has a page mapped by all of them (`SharedCalls`), so a call needs no message: a process announces it in
// its page and reads the pages of the others. Each process numbers its calls in program order, so the n-th call of one
// meets the n-th calls of the others. All must run the same program, as for every collective.
//
// When a process ends, all words of its page that a stream may wait for are set to the awaited values, and every host
// wait ends with an error naming the process. The group is unusable afterwards.
//
// Thread-safe; calls are numbered on the launching thread.
class ProcessGroup {
 public:
  // Returns the group of these processes, in rank order. Created once and never destroyed, because streams may still
  // write the page. Sends this process's page to the others; `neighbours` must be connected to them.
  static Outcome Of(Neighbours* neighbours, const std::vector<int64_t>& processes, const std::string& site,
                    double timeout_s, ProcessGroup** group);

  // Waits for the pages of the others; returns at once if they are mapped.
  Outcome WaitForPages(const std::string& site, double timeout_s);

  size_t size() const { return processes_.size(); }
  size_t own() const { return own_; }
  int64_t process(size_t rank) const { return processes_[rank]; }
  Neighbours& neighbours() const { return *neighbours_; }
  SharedCalls* page(size_t rank) const { return pages_[rank]; }
  SharedCall& call(size_t rank, uint32_t number) const { return pages_[rank]->calls[number % SharedCalls::kNum]; }

  uint32_t Next() { return next_++; }

  // Waits until every process has completed the last call using this entry of the ring.
  Outcome WaitForRing(const std::string& site, uint32_t number, double timeout_s) const;
  // Announces a call; requires WaitForRing.
  void Announce(uint32_t number, const Announcement& announcement) const;
  // Waits until all have announced an equal request; fails if one of them has failed.
  Outcome WaitForAll(const std::string& site, uint32_t number, double timeout_s) const;
  // Waits until a process has queued all its tasks up to this one.
  Outcome WaitForQueued(const std::string& site, uint32_t number, size_t rank, size_t task, double timeout_s) const;
  void ShowQueued(uint32_t number, size_t tasks) const;

  // Publishes that the call has failed here. Returns the ranks that had announced it before: they may continue and copy
  // from this one.
  std::vector<size_t> ShowFailure(uint32_t number, const Outcome& outcome) const;
  // Marks a call as copied for which this process queues no copies.
  void ShowCopied(uint32_t number) const;

  // Returns the failure of a send to a process of the group.
  Outcome Unsent(const std::string& site, const SocketResult& sent) const;

  // Returns a failure if the streams' waits of this call were released because a process had ended: the copies are then
  // invalid.
  Outcome WhyReleased(const std::string& site, uint32_t number) const;

  // Disables the host's waits of one kind, "ring", "all" or "queued", to test that each is needed.
  void LeaveOut(const std::string& waits) { left_out_ = waits; }

 private:
  ProcessGroup(Neighbours* neighbours, const std::vector<int64_t>& processes);

  Status MakePage();
  Outcome SendPage(const std::string& site, double timeout_s);
  void Release(int64_t process);
  Outcome Until(const std::string& site, const char* what, double timeout_s, size_t rank,
                const std::function<bool()>& is_so) const;
  Outcome Ended(const std::string& site, size_t rank) const;
  size_t FirstEnded(size_t rank) const;
  size_t RankOf(int64_t process) const;

  Neighbours* const neighbours_;
  const std::vector<int64_t> processes_;
  uint64_t id_ = 0;
  size_t own_ = 0;
  std::atomic<uint32_t> next_{SharedCalls::kNum};
  Descriptor memory_;
  std::mutex waiting_;                               // for pages
  mutable std::mutex mutex_;                         // of the release
  std::vector<SharedCalls*> pages_;                  // by rank
  std::vector<bool> released_;                       // by rank
  std::vector<std::pair<uint32_t, size_t>> broken_;  // calls in flight and their rank
  std::vector<bool> has_page_;                       // of this process, by rank
  mutable std::atomic<size_t> first_ended_{SIZE_MAX};
  std::string left_out_;
};

}  // namespace moe_lb
