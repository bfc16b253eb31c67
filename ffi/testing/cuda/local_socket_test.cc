// Sockets between processes: users, addresses and closed descriptors.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>
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
    _exit(ConnectLocally(address, &own).problem ? 1 : 0);
  }
  int code = 0;
  EXPECT_EQ(waitpid(child, &code, 0), child);
  *connected =
      WEXITSTATUS(code) == 0 ? Ok() : Problem("the child ends with " + std::to_string(WEXITSTATUS(code)), true);
  return AcceptLocally(listening, &socket).problem;
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
  constexpr size_t kMost = 107;  // of sun_path, after a zero byte
  // Nobody listens.
  EXPECT(ConnectLocally(std::string(kMost, 'a'), &socket).outcome == SocketOutcome::kEnded);
  for (const size_t size : {size_t{0}, kMost + 1}) {
    const SocketResult one = ConnectLocally(std::string(size, 'a'), &socket);
    EXPECT(one.problem->find("; expected 1 to 107") != std::string::npos);
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
  EXPECT(!ConnectLocally(address, &sender).problem);
  EXPECT(!AcceptLocally(listening, &receiver).problem);
  close(STDIN_FILENO);
  {
    Descriptor memory, received;
    EXPECT(!MakeSharedMemory(64, &memory));
    EXPECT_EQ(memory.get(), 0);
    EXPECT(!SendNote(sender, PeerNote(), memory.get()).problem);
    PeerNote note;
    EXPECT(!ReceiveNote(receiver, &note, &received).problem);
    void* mapped = nullptr;
    EXPECT(!MapSharedMemory(received, 64, &mapped));
  }
  EXPECT(fcntl(STDIN_FILENO, F_GETFD) < 0);
}

// Of a pair of sockets: an empty and a full buffer, too many descriptors, a closed end, and a note of another size.
void EveryOperationHasAnOutcome() {
  Descriptor listening, sender, receiver, received;
  std::string address;
  PeerNote note;
  EXPECT(!ListenLocally(&listening, &address));
  EXPECT(AcceptLocally(listening, &receiver).outcome == SocketOutcome::kStalled);
  EXPECT(!ConnectLocally(address, &sender).problem);
  EXPECT(!AcceptLocally(listening, &receiver).problem);
  EXPECT(ReceiveNote(receiver, &note, &received).outcome == SocketOutcome::kStalled);
  int64_t sent = 0;
  while (!SendNote(sender, note, -1).problem) ++sent;
  EXPECT(sent > 10 && SendNote(sender, note, -1).outcome == SocketOutcome::kStalled);
  while (sent-- > 0) EXPECT(!ReceiveNote(receiver, &note, &received).problem);
  EXPECT(!SendNote(sender, note, listening.get()).problem);
  rlimit limit = {};
  EXPECT(getrlimit(RLIMIT_NOFILE, &limit) == 0);
  const rlimit none = {0, limit.rlim_max};
  EXPECT(setrlimit(RLIMIT_NOFILE, &none) == 0);
  const SocketResult dropped = ReceiveNote(receiver, &note, &received);
  EXPECT(setrlimit(RLIMIT_NOFILE, &limit) == 0);
  EXPECT(dropped.outcome == SocketOutcome::kBroken && *dropped.problem == "recvmsg: Too many open files");
  EXPECT(send(sender.get(), "short", 5, 0) == 5);
  EXPECT(ReceiveNote(receiver, &note, &received).outcome == SocketOutcome::kBroken);
  receiver = Descriptor();
  EXPECT(SendNote(sender, note, -1).outcome == SocketOutcome::kEnded);
  EXPECT(ReceiveNote(sender, &note, &received).outcome == SocketOutcome::kEnded);
}

}  // namespace
}  // namespace moe_lb

int main() {
  moe_lb::TheSameUserMayConnect();
  moe_lb::AnotherUserMayNot();
  moe_lb::AnAddressFitsIntoItsField();
  moe_lb::ADescriptorIsClosedWithItsOwner();
  moe_lb::EveryOperationHasAnOutcome();
  moe_lb::DescriptorZeroIsLikeOthers();
}
