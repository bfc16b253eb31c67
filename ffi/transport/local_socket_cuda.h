// Messages between processes of a machine, with file descriptors. Like all of what processes share, it is built with
// the handlers for GPUs alone: nobody else needs it, and it needs Linux.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "ffi/common/status.h"

namespace moe_lb {

// A file descriptor that is closed with its owner.
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

// What one process tells another.
struct PeerNote {
  enum Kind : uint32_t { kHello, kPage, kMemory, kGone };

  Kind kind = kHello;
  uint32_t process = 0;           // kHello: who calls
  uint64_t id = 0;                // kPage: of the group of processes; kMemory and kGone: of the allocation
  uint64_t size = 0;              // kMemory: bytes
  unsigned char handle[64] = {};  // kMemory without a file descriptor: CUDA's handle of it
};

// Sockets keep borders between messages, and have names in the abstract namespace: the system forgets them with the
// process, so that nothing is left in a file system. Only processes of the same user are talked to.

// Its name is random; others reach it inside the same network namespace.
Status ListenLocally(Descriptor* socket, std::string* address);
Status ConnectLocally(const std::string& address, Descriptor* socket);
Status AcceptLocally(const Descriptor& listening, Descriptor* socket);

// Never waits: notes are few, and one that the system has no room for is an error. descriptor: -1 for none.
Status SendNote(const Descriptor& socket, const PeerNote& note, int descriptor);

enum class Received { kNote, kNothing, kEnd };

// kNothing: none is there yet. kEnd: the other process has closed its end, or ended.
Received ReceiveNote(const Descriptor& socket, PeerNote* note, Descriptor* descriptor);

// Memory that processes share when they have its descriptor; it has no name in any file system.
Status MakeSharedMemory(size_t size, Descriptor* descriptor);
Status MapSharedMemory(const Descriptor& descriptor, size_t size, void** memory);

}  // namespace moe_lb
