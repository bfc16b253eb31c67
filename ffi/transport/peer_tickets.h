// Tickets match a `join` with its `start`: numbers carried by a program from one call to the other.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "ffi/common/status.h"

namespace moe_lb {

// Open tickets of a process, each with a `Note` for the second call. A program failing between the two calls leaves
// its tickets open, so only those of the last `kMaxRuns` runs with open tickets are kept.
//
// Thread-safe.
template <typename Note>
class PeerTickets {
 public:
  static constexpr size_t kMaxRuns = 1024;

  // Returns a number unique in the process.
  int64_t Open(int64_t run_id, Note note) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const int64_t ticket = ++last_;
    Insert(run_id, ticket, std::move(note));
    return ticket;
  }

  // Opens a ticket with a number of the caller's choice and replaces an open ticket of the same number. Several tickets
  // may share a negative number; they are closed in the order of opening.
  void OpenAs(int64_t run_id, int64_t ticket, Note note) {
    const std::lock_guard<std::mutex> lock(mutex_);
    // Only the age of a run is derived from the number.
    ++last_;
    Insert(run_id, ticket, std::move(note));
  }

  // Moves the note out and closes the ticket. Fails if the ticket is not open in this run.
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
    // Run ids are unordered, so a run is as old as its first ticket.
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
