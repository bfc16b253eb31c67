// Preloaded into a process and its children: counts system calls on files of a folder, and fails one of them.
//
// FAULT_CONTROL names a file with a `Control`, which the test writes and reads. FAULT_FOLDER is the folder.
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace {

enum Kind { kWrite, kSync, kRename, kOpen, kSend, kReceive, kNumKinds };

struct Control {
  std::atomic<int64_t> counts[kNumKinds];
  int64_t kind;    // of the failed call; -1 for none
  int64_t number;  // of it, from 0
  int64_t error;
};

Control* TheControl() {
  static Control* const control = []() -> Control* {
    const char* const path = getenv("FAULT_CONTROL");
    if (path == nullptr) return nullptr;
    // A call of this library, which recurses once.
    const auto real = reinterpret_cast<int (*)(const char*, int, ...)>(dlsym(RTLD_NEXT, "open"));
    const int file = real(path, O_RDWR | O_CLOEXEC);
    if (file < 0) abort();
    void* const mapped = mmap(nullptr, sizeof(Control), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (mapped == MAP_FAILED) abort();
    return static_cast<Control*>(mapped);
  }();
  return control;
}

bool IsInFolder(const char* path) {
  static const char* const folder = getenv("FAULT_FOLDER");
  return path != nullptr && folder != nullptr && strncmp(path, folder, strlen(folder)) == 0;
}

bool IsInFolder(int file) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  const ssize_t size = readlink(link, path, sizeof path - 1);
  if (size < 0) return false;
  path[size] = 0;
  return IsInFolder(path);
}

// A socket pair inside this process wakes event loops; its errors are not those of a connection.
bool IsInProcess(int file) {
  ucred peer{};
  socklen_t size = sizeof peer;
  return getsockopt(file, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.pid == getpid();
}

// Counts a call; true if it must fail, with its error in errno.
bool Fails(Kind kind) {
  Control* const control = TheControl();
  if (control == nullptr) return false;
  const int64_t number = control->counts[kind]++;
  if (control->kind != kind || control->number != number) return false;
  errno = static_cast<int>(control->error);
  return true;
}

template <typename Function>
Function* Next(Function*, const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

#define NEXT(name) static auto* const next = Next(&name, #name)
#define ON_FILE(result, name, kind, parameters, arguments) \
  extern "C" result name parameters {                      \
    NEXT(name);                                            \
    if (IsInFolder(file) && Fails(kind)) return -1;        \
    return next arguments;                                 \
  }
#define ON_SOCKET(name, kind, parameters, arguments)  \
  extern "C" ssize_t name parameters {                \
    NEXT(name);                                       \
    if (!IsInProcess(file) && Fails(kind)) return -1; \
    return next arguments;                            \
  }

ON_FILE(ssize_t, write, kWrite, (int file, const void* bytes, size_t size), (file, bytes, size))
ON_FILE(ssize_t, pwrite, kWrite, (int file, const void* bytes, size_t size, off_t at), (file, bytes, size, at))
ON_FILE(ssize_t, pwrite64, kWrite, (int file, const void* bytes, size_t size, off64_t at), (file, bytes, size, at))
ON_FILE(ssize_t, writev, kWrite, (int file, const iovec* parts, int number), (file, parts, number))
ON_FILE(int, fsync, kSync, (int file), (file))
ON_FILE(int, fdatasync, kSync, (int file), (file))
ON_SOCKET(send, kSend, (int file, const void* bytes, size_t size, int flags), (file, bytes, size, flags))
ON_SOCKET(sendmsg, kSend, (int file, const msghdr* message, int flags), (file, message, flags))
ON_SOCKET(recv, kReceive, (int file, void* bytes, size_t size, int flags), (file, bytes, size, flags))
ON_SOCKET(recvmsg, kReceive, (int file, msghdr* message, int flags), (file, message, flags))

extern "C" int rename(const char* from, const char* to) {
  NEXT(rename);
  return IsInFolder(from) && Fails(kRename) ? -1 : next(from, to);
}
extern "C" int renameat(int at, const char* from, int to_at, const char* to) {
  NEXT(renameat);
  return IsInFolder(from) && Fails(kRename) ? -1 : next(at, from, to_at, to);
}

#define OPEN(name, parameters, arguments)                          \
  extern "C" int name parameters {                                 \
    NEXT(name);                                                    \
    mode_t mode = 0;                                               \
    if ((flags & (O_CREAT | O_TMPFILE)) != 0) {                    \
      va_list rest;                                                \
      va_start(rest, flags);                                       \
      mode = va_arg(rest, mode_t);                                 \
      va_end(rest);                                                \
    }                                                              \
    return IsInFolder(path) && Fails(kOpen) ? -1 : next arguments; \
  }
OPEN(open, (const char* path, int flags, ...), (path, flags, mode))
OPEN(open64, (const char* path, int flags, ...), (path, flags, mode))
OPEN(openat, (int at, const char* path, int flags, ...), (at, path, flags, mode))
OPEN(openat64, (int at, const char* path, int flags, ...), (at, path, flags, mode))
