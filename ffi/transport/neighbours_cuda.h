// Connections to the other processes of this machine: one socket to each.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/transport/local_socket_cuda.h"

namespace moe_lb {

// Sends notes, stores received notes until they are taken, and detects the end of a process: the system closes its
// sockets within milliseconds. One watching thread receives and detects. It does not call CUDA, so that it can release
// any wait for an ended process.
//
// Thread-safe.
class Neighbours {
 public:
  // The instance of this process; leaked on purpose, because threads may use it while the process exits.
  static Neighbours& OfProcess();

  // Returns the address at which other processes reach this one; the same at every call.
  Status Listen(std::string* address);

  // Connects to all processes not connected yet, and returns when all are. `own` is this process's number, the
  // same at every call. `addresses` is keyed by process number; the own entry is ignored.
  Status Connect(int64_t own, const std::map<int64_t, std::string>& addresses, double timeout_s);

  int64_t own() const { return own_; }

  // Waits up to the time limit while the process does not read its messages. descriptor: -1 for none.
  SocketResult Send(int64_t process, const PeerNote& note, int descriptor, double timeout_s);

  // Removes and returns the first note of this kind and id from this process; false if none has arrived. A kGone drops
  // a kMemory that was not taken, and is then not stored.
  bool Take(int64_t process, PeerNote::Kind kind, uint64_t id, PeerNote* note, Descriptor* descriptor);

  // Takes a note and waits for it up to the time limit, or to the end of the process. missing: names it in the failure.
  Status Await(int64_t process, PeerNote::Kind kind, uint64_t id, double timeout_s, const char* missing, PeerNote* note,
               Descriptor* descriptor);

  // True if the process has ended, was never connected, or its connection is broken.
  bool IsGone(int64_t process) const { return WhyGone(process).outcome != SocketOutcome::kDone; }
  // The reason, naming the process: kEnded or kBroken; kDone if it is connected.
  SocketResult WhyGone(int64_t process) const;

  // Calls `gone` on the watching thread when a process ends, also for processes already ended. `gone` must be
  // short. It is never removed.
  void OnEnd(std::function<void(int64_t process)> gone);

  int64_t num_sent() const { return num_sent_; }

 private:
  struct Link {
    Descriptor socket;
    SocketResult end;  // kDone while it is open
  };
  using Key = std::pair<int64_t, std::pair<PeerNote::Kind, uint64_t>>;
  using StoredNote = std::pair<PeerNote, Descriptor>;

  void Watch();
  void Accept();
  // Stores all notes that have arrived; returns kStalled if the process is still connected.
  SocketResult Read(const Link& link, int64_t process);
  void End(int64_t process, SocketResult end);  // nothing for kStalled
  void AddLink(int64_t process, Descriptor socket);
  void Wake();
  std::shared_ptr<Link> Find(int64_t process) const;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Descriptor listening_;
  Descriptor wake_;
  std::string address_;
  Status not_accepted_;  // the last failure to accept a connection
  std::atomic<int64_t> own_{-1};
  std::atomic<int64_t> num_sent_{0};
  std::map<int64_t, std::shared_ptr<Link>> links_;
  std::set<int64_t> ended_;
  std::multimap<Key, StoredNote> notes_;  // several groups of processes may send the same
  std::vector<std::function<void(int64_t)>> on_end_;
};

}  // namespace moe_lb
