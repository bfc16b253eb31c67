#include "ffi/testing/cuda/sockets.h"

#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <map>
#include <mutex>

namespace moe_lb::testing {
namespace {

struct Faults {
  std::mutex mutex;
  std::string function;
  int64_t after = 0;
  int64_t count = 0;
  int error = 0;  // 0: SIGKILL
  std::map<std::string, int64_t> num_calls;
};

Faults& TheFaults() {
  static auto* const faults = new Faults;
  return *faults;
}

void Set(const std::string& function, int64_t after, int error, int64_t count) {
  Faults& faults = TheFaults();
  const std::lock_guard<std::mutex> lock(faults.mutex);
  faults.function = function;
  faults.after = after;
  faults.count = count;
  faults.error = error;
}

// Returns the error of this call, 0 for none.
int ErrorOf(const char* function) {
  Faults& faults = TheFaults();
  const std::lock_guard<std::mutex> lock(faults.mutex);
  ++faults.num_calls[function];
  if (faults.function != function || faults.after-- > 0 || faults.count == 0) return 0;
  --faults.count;
  if (faults.error == 0) kill(getpid(), SIGKILL);
  return faults.error;
}

// Makes the system call unless it fails.
template <typename... Arguments>
long Call(const char* function, long number, Arguments... arguments) {
  if (const int error = ErrorOf(function); error != 0) {
    errno = error;
    return -1;
  }
  return syscall(number, arguments...);
}

}  // namespace

void FailSocketCalls(const std::string& function, int64_t after, int error, int64_t count) {
  Set(function, after, error, count);
}

void DieAtSocketCall(const std::string& function, int64_t after) { Set(function, after, 0, 1); }

int64_t NumSocketCalls(const std::string& function) {
  Faults& faults = TheFaults();
  const std::lock_guard<std::mutex> lock(faults.mutex);
  return faults.num_calls[function];
}

}  // namespace moe_lb::testing

// Linked instead of those of the C library.
using moe_lb::testing::Call;
extern "C" {
ssize_t sendmsg(int socket, const msghdr* message, int flags) {
  return Call("sendmsg", SYS_sendmsg, socket, message, flags);
}
ssize_t recvmsg(int socket, msghdr* message, int flags) { return Call("recvmsg", SYS_recvmsg, socket, message, flags); }
int accept4(int socket, sockaddr* address, socklen_t* size, int flags) {
  return static_cast<int>(Call("accept4", SYS_accept4, socket, address, size, flags));
}
int connect(int socket, const sockaddr* address, socklen_t size) {
  return static_cast<int>(Call("connect", SYS_connect, socket, address, size));
}
}
