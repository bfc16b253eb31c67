// Processes of one machine, one GPU each, that copy from each other: how their hosts meet.
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

// What a rank tells the others about one call.
struct Announcement {
  uint64_t request_hash = 0;
  std::vector<SharedArray> home;
  std::vector<SharedArray> slots;
};

// Every process has a page that all of them map (`SharedCalls`), so that a call needs no message: a process announces
// it there, and looks there for those of the others. Calls are counted by each process in the order of its program, so
// the n-th call of one meets the n-th calls of the others: all run the same program, as every collective demands.
//
// When a process ends, however it does, all words of its page that a stream may wait for are set to what is waited for,
// and every wait of a host ends with an error that names it. Such a group is of no use any more.
//
// Threads: any; calls are numbered on the thread that launches the program.
class ProcessGroup {
 public:
  // The group of these processes, in the order of their ranks. Made once, and never destroyed: streams may still write
  // the page. Sends this process's page to the others; `neighbours` must be connected with them.
  static Status Of(Neighbours* neighbours, const std::vector<int64_t>& processes, ProcessGroup** group);

  // Waits for the pages of the others; once there it returns at once.
  Outcome WaitForPages(const std::string& site, double timeout_s);

  size_t size() const { return processes_.size(); }
  size_t own() const { return own_; }
  int64_t process(size_t rank) const { return processes_[rank]; }
  Neighbours& neighbours() const { return *neighbours_; }
  SharedCalls* page(size_t rank) const { return pages_[rank]; }
  SharedCall& call(size_t rank, uint32_t number) const { return pages_[rank]->calls[number % SharedCalls::kNum]; }

  uint32_t Next() { return next_++; }

  // Waits until every process is done with the call that stood there before.
  Outcome WaitForRing(const std::string& site, uint32_t number, double timeout_s) const;
  // After that.
  void Announce(uint32_t number, const Announcement& announcement) const;
  // Waits until all have announced the same, or fails where one of them has failed.
  Outcome WaitForAll(const std::string& site, uint32_t number, double timeout_s) const;
  // Waits until a process has queued all its tasks up to this one.
  Outcome WaitForQueued(const std::string& site, uint32_t number, size_t rank, size_t task, double timeout_s) const;
  void ShowQueued(uint32_t number, size_t tasks) const;

  // Tells the others, at any time of a call, that it has failed here. Returns those that had announced it already: they
  // may go on with it, and copy from here.
  std::vector<size_t> ShowFailure(uint32_t number, const Outcome& outcome) const;
  // Of a call for which this process's streams do nothing.
  void ShowCopied(uint32_t number) const;

  // Nothing, or that the streams' waits of this call were ended because a process had ended: what was copied is of no
  // use.
  Status WhyReleased(const std::string& site, uint32_t number) const;

  // Leaves out the host's waits of one kind, "ring", "all" or "queued": for the test that each is needed.
  void LeaveOut(const std::string& waits) { left_out_ = waits; }

 private:
  ProcessGroup(Neighbours* neighbours, const std::vector<int64_t>& processes);

  Status MakePage();
  Status SendPage();
  void Release(int64_t process);
  Outcome Until(const std::string& site, const char* what, double timeout_s, size_t rank,
                const std::function<bool()>& is_so) const;
  Status Ended(const std::string& site, size_t rank) const;

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
  std::vector<std::pair<uint32_t, size_t>> broken_;  // calls that were under way, and with whom
  std::atomic<size_t> first_ended_{SIZE_MAX};
  std::string left_out_;
};

}  // namespace moe_lb
