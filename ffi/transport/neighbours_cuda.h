// The other processes of this machine that a process copies from: a socket to each.
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

// Sends notes, keeps those that come until somebody takes them, and notices when a process ends: the system closes its
// sockets however it ends, within milliseconds. One thread does both. It takes no part in anything else, and never
// calls CUDA, so that it can free those that wait for a process that is gone, whatever they wait in.
//
// Threads: any.
class Neighbours {
 public:
  // Of this process; leaked on purpose, as threads may use it while the process exits.
  static Neighbours& OfProcess();

  // Where the others reach this process; the same at every call.
  Status Listen(std::string* address);

  // Connects with all of them that are not connected yet, and returns when all are. `own` is this process's number, the
  // same at every call; `addresses` by the numbers of processes, this one's own is ignored.
  Status Connect(int64_t own, const std::map<int64_t, std::string>& addresses, double timeout_s);

  int64_t own() const { return own_; }

  Status Send(int64_t process, const PeerNote& note, int descriptor = -1);

  // The note of that kind and number from that process, once it is there; else nothing. It is taken away.
  bool Take(int64_t process, PeerNote::Kind kind, uint64_t id, PeerNote* note, Descriptor* descriptor);

  // Processes that have ended, or never were connected.
  bool IsGone(int64_t process) const;

  // Calls `gone` when a process ends, on the watching thread, also for one that had ended before; it must be short. It
  // is never forgotten.
  void OnEnd(std::function<void(int64_t process)> gone);

  int64_t num_sent() const { return num_sent_; }

 private:
  struct Link {
    Descriptor socket;
    bool is_open = true;
  };
  using Key = std::pair<int64_t, std::pair<PeerNote::Kind, uint64_t>>;
  using StoredNote = std::pair<PeerNote, Descriptor>;

  void Watch();
  void Accept();
  bool Read(const std::shared_ptr<Link>& link, int64_t process);  // false: it has ended
  void End(int64_t process);
  void AddLink(int64_t process, Descriptor socket);
  void Wake();
  std::shared_ptr<Link> Find(int64_t process) const;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Descriptor listening_;
  Descriptor wake_;
  std::string address_;
  std::atomic<int64_t> own_{-1};
  std::atomic<int64_t> num_sent_{0};
  std::map<int64_t, std::shared_ptr<Link>> links_;
  std::set<int64_t> ended_;
  std::map<Key, StoredNote> notes_;
  std::vector<std::function<void(int64_t)>> on_end_;
};

}  // namespace moe_lb
