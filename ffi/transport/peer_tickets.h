// Tickets tie a `join` to its `start`: numbers that a program carries from one call to the other.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "ffi/common/status.h"

namespace moe_lb {

// Open tickets of a process, each with a note (`Note`: what the second call must know). A program that fails between
// the two calls leaves its tickets open, so only those of the last `kMaxRuns` runs with open ones are kept.
//
// Threads: any.
template <typename Note>
class PeerTickets {
 public:
  static constexpr size_t kMaxRuns = 1024;

  // A number that no other ticket of the process has.
  int64_t Open(int64_t run_id, Note note) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const int64_t ticket = ++last_;
    Insert(run_id, ticket, std::move(note));
    return ticket;
  }

  // Under a number of the caller's choice; an open ticket of that number is replaced. Under a negative one, which
  // several may have at once, they are closed in the order in which they were opened.
  void OpenAs(int64_t run_id, int64_t ticket, Note note) {
    const std::lock_guard<std::mutex> lock(mutex_);
    // The number is used only to tell how old a run is.
    ++last_;
    Insert(run_id, ticket, std::move(note));
  }

  // Takes the note, once. Refused: a ticket that is not open in this run.
  Status Close(int64_t run_id, int64_t ticket, Note* note) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto run = runs_.find(run_id);
    if (run == runs_.end() || run->second.notes.count(ticket) == 0) {
      return Refuse("ticket is ", ticket, "; expected one that start gave in this run of the program and that was not ",
                    "joined yet");
    }
    auto& notes = run->second.notes;
    const auto first = notes.lower_bound(ticket);
    *note = std::move(first->second);
    notes.erase(first);
    if (notes.empty()) runs_.erase(run);
    return Ok();
  }

  size_t num_open() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    size_t count = 0;
    for (const auto& [id, run] : runs_) count += run.notes.size();
    return count;
  }

 private:
  struct Run {
    int64_t first = 0;
    std::multimap<int64_t, Note> notes;
  };

  void Insert(int64_t run_id, int64_t ticket, Note note) {
    Run& run = runs_[run_id];
    // Run ids are in no order that could be relied on, so a run is as old as its first ticket.
    if (run.notes.empty()) run.first = last_;
    if (ticket >= 0) run.notes.erase(ticket);
    run.notes.emplace(ticket, std::move(note));
    if (runs_.size() > kMaxRuns) DropOldest();
  }

  void DropOldest() {
    auto oldest = runs_.begin();
    for (auto run = runs_.begin(); run != runs_.end(); ++run) {
      if (run->second.first < oldest->second.first) oldest = run;
    }
    runs_.erase(oldest);
  }

  mutable std::mutex mutex_;
  std::map<int64_t, Run> runs_;
  int64_t last_ = 0;
};

}  // namespace moe_lb
