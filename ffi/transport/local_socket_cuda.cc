#include "ffi/transport/local_socket_cuda.h"

#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

namespace moe_lb {
namespace {

Status SystemError(const char* what, int error) {
  Problem problem(std::string(what) + ": " + std::strerror(error), true);
  return problem;
}

Status SystemError(const char* what) { return SystemError(what, errno); }

SocketResult Broken(Status problem) { return {SocketOutcome::kBroken, std::move(problem)}; }

Status MakeSocket(Descriptor* socket) {
  *socket = Descriptor(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  return *socket ? Ok() : SystemError("socket");
}

// A name with a leading zero byte is abstract.
socklen_t FillName(const std::string& address, sockaddr_un* name) {
  name->sun_family = AF_UNIX;
  std::memcpy(name->sun_path + 1, address.data(), address.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + address.size());
}

// Check the user: abstract names have no permissions, so any user may connect.
Status CheckUser(const Descriptor& socket) {
  ucred user = {};
  socklen_t size = sizeof user;
  if (getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &user, &size) != 0) return SystemError("getsockopt");
  if (user.uid == geteuid()) return Ok();
  return Refuse("the process at the other end belongs to user ", user.uid, "; expected ", geteuid());
}

}  // namespace

Descriptor::~Descriptor() {
  if (number_ >= 0) close(number_);
}

Status ListenLocally(Descriptor* socket, std::string* address) {
  unsigned char random[16];
  if (getrandom(random, sizeof random, 0) != sizeof random) return SystemError("getrandom");
  *address = "jax_moe_lb-";
  for (const unsigned char byte : random) {
    *address += "0123456789abcdef"[byte / 16];
    *address += "0123456789abcdef"[byte % 16];
  }
  if (Status bad = MakeSocket(socket)) return bad;
  sockaddr_un name = {};
  const socklen_t size = FillName(*address, &name);
  if (bind(socket->get(), reinterpret_cast<const sockaddr*>(&name), size) != 0) return SystemError("bind");
  return listen(socket->get(), SOMAXCONN) == 0 ? Ok() : SystemError("listen");
}

// The only place that reads errors of sockets.
SocketResult OutcomeOf(const char* call, int error) {
  switch (error) {
    case 0:
      return {};
    case EPIPE:
    case ECONNRESET:
    case ECONNREFUSED:
      return {SocketOutcome::kEnded, Problem("it has ended; expected all to run until the program ends", true)};
    // Interrupted, a full or empty buffer, or too many descriptors in flight.
    case EINTR:
    case EAGAIN:
    case ENOBUFS:
    case ENOMEM:
    case ETOOMANYREFS:
    // The other end has given up before it was accepted.
    case ECONNABORTED:
      return {SocketOutcome::kStalled, SystemError(call, error)};
    default:
      return Broken(SystemError(call, error));
  }
}

SocketResult Repeat(double timeout_s, const std::function<SocketResult()>& operation) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point begin = Clock::now();
  for (;;) {
    SocketResult last = operation();
    const double waited = std::chrono::duration<double>(Clock::now() - begin).count();
    if (last.outcome != SocketOutcome::kStalled || waited >= timeout_s) return last;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

SocketResult ConnectLocally(const std::string& address, Descriptor* socket) {
  sockaddr_un name = {};
  if (address.empty() || address.size() >= sizeof name.sun_path) {
    return Broken(Refuse("address has ", address.size(), " characters; expected 1 to ", sizeof name.sun_path - 1));
  }
  if (Status bad = MakeSocket(socket)) return Broken(bad);
  const socklen_t size = FillName(address, &name);
  const int failed = connect(socket->get(), reinterpret_cast<const sockaddr*>(&name), size);
  if (failed != 0) return OutcomeOf("connect", errno);
  const Status bad = CheckUser(*socket);
  return bad ? Broken(bad) : SocketResult();
}

SocketResult AcceptLocally(const Descriptor& listening, Descriptor* socket) {
  *socket = Descriptor(accept4(listening.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!*socket) return OutcomeOf("accept", errno);
  const Status bad = CheckUser(*socket);
  return bad ? Broken(bad) : SocketResult();
}

SocketResult SendNote(const Descriptor& socket, const PeerNote& note, int descriptor) {
  PeerNote copy = note;
  iovec part = {&copy, sizeof copy};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (descriptor >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
  }
  // Without the flag, a process whose peer has just ended would be killed by a signal.
  const ssize_t size = sendmsg(socket.get(), &message, MSG_NOSIGNAL);
  return OutcomeOf("sendmsg", size < 0 ? errno : 0);
}

SocketResult ReceiveNote(const Descriptor& socket, PeerNote* note, Descriptor* descriptor) {
  iovec part = {note, sizeof *note};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t size = recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC);
  if (size < 0) return OutcomeOf("recvmsg", errno);
  if (size == 0) return OutcomeOf("recvmsg", ECONNRESET);
  const cmsghdr* const header = CMSG_FIRSTHDR(&message);
  if (header != nullptr && header->cmsg_type == SCM_RIGHTS && header->cmsg_len == CMSG_LEN(sizeof(int))) {
    int number = -1;
    std::memcpy(&number, CMSG_DATA(header), sizeof number);
    *descriptor = Descriptor(number);
  }
  // The system drops the descriptor of a message if this process has too many.
  if ((message.msg_flags & MSG_CTRUNC) != 0) return OutcomeOf("recvmsg", EMFILE);
  // A note of another size comes from another version of this library, which is incompatible.
  return OutcomeOf("recvmsg", size == sizeof *note ? 0 : EPROTO);
}

Status MakeSharedMemory(size_t size, Descriptor* descriptor) {
  *descriptor = Descriptor(memfd_create("jax_moe_lb", MFD_CLOEXEC));
  if (!*descriptor) return SystemError("memfd_create");
  return ftruncate(descriptor->get(), static_cast<off_t>(size)) == 0 ? Ok() : SystemError("ftruncate");
}

Status MapSharedMemory(const Descriptor& descriptor, size_t size, void** memory) {
  struct stat found = {};
  if (fstat(descriptor.get(), &found) != 0) return SystemError("fstat");
  // Reading beyond the end of a mapped file kills the process.
  if (static_cast<size_t>(found.st_size) < size) {
    return Refuse("shared memory has ", found.st_size, " bytes; expected ", size);
  }
  *memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor.get(), 0);
  return *memory != MAP_FAILED ? Ok() : SystemError("mmap");
}

}  // namespace moe_lb
