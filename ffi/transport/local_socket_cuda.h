// Messages between processes of one machine, with file descriptors. Built with the CUDA handlers alone: it requires
// Linux, and only they use it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "ffi/common/status.h"

namespace moe_lb {

// A file descriptor, closed with its owner.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor();

  int get() const { return number_; }
  explicit operator bool() const { return number_ >= 0; }

 private:
  int number_ = -1;
};

// A message from one process to another.
struct PeerNote {
  enum Kind : uint32_t { kHello, kPage, kMemory, kGone, kProbe };

  Kind kind = kHello;
  uint32_t process = 0;           // kHello: the sender
  uint64_t id = 0;                // kPage: of the group of processes; kMemory and kGone: of the allocation
  uint64_t size = 0;              // kMemory: bytes
  unsigned char handle[64] = {};  // kMemory without a file descriptor: CUDA's handle of it; kProbe: a `SharedArray`
};

// Outcome of one operation of a socket.
enum class SocketOutcome {
  kDone,     // connected, sent or received
  kEnded,    // the other process has ended, or closed its end
  kStalled,  // it may succeed later: the buffer is full or empty, or the system lacks memory
  kBroken,   // any other error
};

struct SocketResult {
  SocketOutcome outcome = SocketOutcome::kDone;
  Status problem;        // empty if done
  int64_t process = -1;  // at the other end; -1 if unknown
};

// Returns the outcome of a system call by its `errno`, 0 if it succeeded.
SocketResult OutcomeOf(const char* call, int error);

// Repeats a stalled operation until the time limit.
SocketResult Repeat(double timeout_s, const std::function<SocketResult()>& operation);

// Sockets preserve message boundaries. Their names are in the abstract namespace, which the system cleans up with the
// process, so no file remains. Only processes of the same user are accepted.

// Listens under a random name, reachable inside the same network namespace.
Status ListenLocally(Descriptor* socket, std::string* address);
// These do not block.
SocketResult ConnectLocally(const std::string& address, Descriptor* socket);
SocketResult AcceptLocally(const Descriptor& listening, Descriptor* socket);
// descriptor: -1 for none.
SocketResult SendNote(const Descriptor& socket, const PeerNote& note, int descriptor);
SocketResult ReceiveNote(const Descriptor& socket, PeerNote* note, Descriptor* descriptor);

// Anonymous memory shared by processes through its descriptor.
Status MakeSharedMemory(size_t size, Descriptor* descriptor);
Status MapSharedMemory(const Descriptor& descriptor, size_t size, void** memory);

}  // namespace moe_lb
