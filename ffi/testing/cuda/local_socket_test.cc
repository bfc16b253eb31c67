// Sockets between processes: users, addresses and closed descriptors.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <string>

#include "ffi/common/testing.h"
#include "ffi/transport/local_socket_cuda.h"

namespace moe_lb {
namespace {

constexpr uid_t kOther = 65534;  // nobody

// Connects in a child process of the given user, and returns the status of accepting it.
Status AcceptFrom(uid_t user, Status* connected) {
  Descriptor listening, socket;
  std::string address;
  EXPECT(!ListenLocally(&listening, &address));
  const pid_t child = fork();
  if (child == 0) {
    Descriptor own;
    if (setuid(user) != 0) _exit(2);
    _exit(ConnectLocally(address, &own) ? 1 : 0);
  }
  int code = 0;
  EXPECT_EQ(waitpid(child, &code, 0), child);
  *connected =
      WEXITSTATUS(code) == 0 ? Ok() : Problem("the child ends with " + std::to_string(WEXITSTATUS(code)), true);
  return AcceptLocally(listening, &socket);
}

void TheSameUserMayConnect() {
  Status connected;
  EXPECT(!AcceptFrom(geteuid(), &connected));
  EXPECT(!connected);
}

void AnotherUserMayNot() {
  if (geteuid() != 0) return;  // only root can become another user
  Status connected;
  const Status accepted = AcceptFrom(kOther, &connected);
  EXPECT(accepted.has_value());
  EXPECT(accepted && accepted->find("belongs to user 65534") != std::string::npos);
  // The other end also refuses: the listening process belongs to root.
  EXPECT(connected.has_value());
}

void AnAddressFitsIntoItsField() {
  Descriptor socket;
  constexpr size_t kMost = 107;                                           // of sun_path, after a zero byte
  EXPECT(ConnectLocally(std::string(kMost, 'a'), &socket)->is_internal);  // nobody listens
  for (const size_t size : {size_t{0}, kMost + 1}) {
    EXPECT(ConnectLocally(std::string(size, 'a'), &socket)->find("; expected 1 to 107") != std::string::npos);
  }
}

void ADescriptorIsClosedWithItsOwner() {
  int number = -1;
  {
    Descriptor memory;
    EXPECT(!MakeSharedMemory(64, &memory));
    number = memory.get();
    EXPECT(fcntl(number, F_GETFD) >= 0);
  }
  EXPECT(fcntl(number, F_GETFD) < 0);
}

// A process without standard input opens its first file as 0.
void DescriptorZeroIsLikeOthers() {
  Descriptor listening, sender, receiver;
  std::string address;
  EXPECT(!ListenLocally(&listening, &address));
  EXPECT(!ConnectLocally(address, &sender));
  EXPECT(!AcceptLocally(listening, &receiver));
  close(STDIN_FILENO);
  {
    Descriptor memory, received;
    EXPECT(!MakeSharedMemory(64, &memory));
    EXPECT_EQ(memory.get(), 0);
    EXPECT(!SendNote(sender, PeerNote(), memory.get()));
    PeerNote note;
    EXPECT(ReceiveNote(receiver, &note, &received) == Received::kNote);
    void* mapped = nullptr;
    EXPECT(!MapSharedMemory(received, 64, &mapped));
  }
  EXPECT(fcntl(STDIN_FILENO, F_GETFD) < 0);
}

}  // namespace
}  // namespace moe_lb

int main() {
  moe_lb::TheSameUserMayConnect();
  moe_lb::AnotherUserMayNot();
  moe_lb::AnAddressFitsIntoItsField();
  moe_lb::ADescriptorIsClosedWithItsOwner();
  moe_lb::DescriptorZeroIsLikeOthers();
}
