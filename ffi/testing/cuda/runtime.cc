#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/testing/cuda/calls.h"
#include "ffi/testing/cuda/stand_in.h"
#include "ffi/testing/cuda/streams.h"

// The stand-in must not order host threads unless CUDA does: counts are relaxed atomics in tables of fixed size, and
// locks are taken only for violations, allocations and queries of tests.
namespace moe_lb::testing {
namespace {

constexpr size_t kMaxFunctions = 64;
constexpr size_t kMaxPlaces = 256;
constexpr size_t kMaxPinned = 4096;

struct Function {
  std::atomic<const char*> name{nullptr};
  std::atomic<int64_t> calls{0};
  std::atomic<int64_t> fails_from{-1};
  std::atomic<int64_t> fails_until{-1};
  std::atomic<int> error{0};
};

struct Place {
  std::atomic<const void*> returns_to{nullptr};
  std::atomic<const char*> function{nullptr};
};

struct Pinned {
  std::atomic<const char*> begin{nullptr};
  std::atomic<size_t> size{0};
};

struct State {
  StandIn options;
  std::array<Function, kMaxFunctions> functions;
  std::array<Place, kMaxPlaces> places;
  std::array<Pinned, kMaxPinned> pinned;
  std::atomic<const void*> ignored{nullptr};
  std::atomic<int> corrupt{0};        // the error of `Corrupt`
  std::atomic<uint64_t> contexts{0};  // bit i: device i
  std::atomic<int64_t> num_events{0};
  std::atomic<CUevent_st*> events{nullptr};
  std::mutex mutex;
  std::vector<std::string> violations;
  std::mutex driver;  // for `allocation_waits`
};

State& TheState() {
  static State* const state = new State;
  return *state;
}

// CUDA Runtime API, Device Management, cudaSetDevice: "If no call to cudaSetDevice() is made before a CUDA call, device
// 0 is the current device" of a host thread, whichever device other threads have.
thread_local int current_device = 0;
thread_local bool has_context = false;
thread_local bool in_host_function = false;
thread_local bool is_executing = false;
thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaStream_t captured = nullptr;  // by this thread
thread_local bool capture_failed = false;

Function& FunctionOf(const char* name) {
  for (Function& function : TheState().functions) {
    const char* found = function.name.load(std::memory_order_relaxed);
    if (found == nullptr && function.name.compare_exchange_strong(found, name, std::memory_order_relaxed)) {
      return function;
    }
    if (std::strcmp(found, name) == 0) return function;
  }
  std::abort();  // more functions than the table has
}

// Excludes launches while pinned memory is (de)allocated and all devices are synchronized for it.
class DriverLock {
 public:
  explicit DriverLock(bool waits) {
    if (!TheState().options.allocation_waits) return;
    lock_ = std::unique_lock<std::mutex>(TheState().driver);
    if (waits) WaitForAllStreams();
  }

 private:
  std::unique_lock<std::mutex> lock_;
};

void Sleep(int64_t us) {
  if (us > 0) std::this_thread::sleep_for(std::chrono::microseconds(us));
}

}  // namespace

cudaError_t Fail(cudaError_t error) {
  last_error = error;
  return error;
}

cudaError_t Forbidden(cudaError_t error, const std::string& what) {
  const std::lock_guard<std::mutex> lock(TheState().mutex);
  TheState().violations.push_back(what);
  return Fail(error);
}

namespace {

// All but calls that make no context and need none.
bool UsesContext(const std::string& name) {
  return name != "cudaGetDevice" && name != "cudaDeviceCanAccessPeer" && name != "cudaGetDeviceCount" &&
         name != "cudaDriverGetVersion" && name != "cudaRuntimeGetVersion";
}

bool IsOfDriver(const char* name) { return std::strncmp(name, "cuda", 4) != 0; }

// CUDA C++ Programming Guide, CUDA Graphs, Prohibited and Unhandled Operations: "It is invalid to synchronize or query
// the execution status of a stream which is being captured or a captured event". CUDA Runtime API, Stream Management,
// cudaThreadExchangeStreamCaptureMode: a thread that captures is "prohibited from potentially unsafe API calls", such
// as queries of any event, and allocations, which may synchronize devices. cuMemcpyBatchAsync fails too (error 900),
// but does not end the capture.
bool IsUnsafeInCapture(const std::string& name) {
  static const auto* const all = new std::set<std::string>{
      "cudaEventQuery", "cudaEventSynchronize", "cudaStreamQuery",      "cudaStreamSynchronize",
      "cudaHostAlloc",  "cudaFreeHost",         "cudaHostRegister",     "cuMemMap",
      "cuMemUnmap",     "cudaIpcOpenMemHandle", "cudaIpcCloseMemHandle"};
  return all->count(name) > 0;
}

cudaError_t EnterCapture(const char* name) {
  const bool is_batch = std::strcmp(name, "cuMemcpyBatchAsync") == 0;
  if (!is_batch && !IsUnsafeInCapture(name)) return cudaSuccess;
  capture_failed = capture_failed || !is_batch;
  return Forbidden(cudaErrorStreamCaptureUnsupported, std::string(name) + " during stream capture");
}

// CUDA C++ Programming Guide, Initialization: the first runtime call that needs it creates the primary context of the
// current device, and cudaSetDevice creates the one of its device since CUDA 12.0.
void NoteContext() {
  has_context = true;
  TheState().contexts.fetch_or(uint64_t{1} << current_device, std::memory_order_relaxed);
}

}  // namespace

cudaError_t Enter(const char* name) {
  if (in_host_function) {
    return Forbidden(cudaErrorNotPermitted, std::string(name) + " was called by a host function");
  }
  // CUDA Driver API, Context Management: a driver function without a current context fails, and creates none.
  if (IsOfDriver(name) && !has_context) {
    return Forbidden(cudaErrorDeviceUninitialized, std::string(name) + " on a thread without a context");
  }
  if (UsesContext(name) && std::strcmp(name, "cudaSetDevice") != 0) NoteContext();
  // CUDA Runtime API, Data types, cudaErrorIllegalAddress: "This leaves the process in an inconsistent state and any
  // further CUDA work will return the same error." Error Handling: calls "may also return error codes from previous,
  // asynchronous launches".
  if (const int corrupt = TheState().corrupt.load(std::memory_order_relaxed); corrupt != 0 && UsesContext(name)) {
    return static_cast<cudaError_t>(corrupt);
  }
  if (captured != nullptr) {
    if (const cudaError_t bad = EnterCapture(name); bad != cudaSuccess) return bad;
  }
  Function& function = FunctionOf(name);
  const int64_t call = function.calls.fetch_add(1, std::memory_order_relaxed);
  if (call < function.fails_from.load(std::memory_order_relaxed)) return cudaSuccess;
  if (call >= function.fails_until.load(std::memory_order_relaxed)) return cudaSuccess;
  if (TheState().options.failures_throw) throw std::bad_alloc();
  const auto error = static_cast<cudaError_t>(function.error.load(std::memory_order_relaxed));
  // CUDA Runtime API, Error Handling, cudaGetLastError: of runtime calls "in the same instance of the CUDA Runtime
  // library in the host thread".
  return IsOfDriver(name) ? error : Fail(error);
}

bool IsIgnored(const char* function, const void* returns_to) {
  for (Place& place : TheState().places) {
    const void* found = place.returns_to.load(std::memory_order_relaxed);
    if (found == returns_to) break;
    if (found == nullptr && place.returns_to.compare_exchange_strong(found, returns_to, std::memory_order_relaxed)) {
      place.function.store(function, std::memory_order_relaxed);
      break;
    }
    if (found == returns_to) break;  // another thread was here first
  }
  return TheState().ignored.load(std::memory_order_relaxed) == returns_to;
}

bool IsPinned(const void* memory, size_t size) {
  const char* const at = static_cast<const char*>(memory);
  for (const Pinned& pinned : TheState().pinned) {
    const char* const begin = pinned.begin.load(std::memory_order_relaxed);
    if (begin != nullptr && begin <= at && at + size <= begin + pinned.size.load(std::memory_order_relaxed))
      return true;
  }
  return false;
}

void AddPinned(void* memory, size_t size) {
  for (Pinned& pinned : TheState().pinned) {
    const char* free = nullptr;
    if (!pinned.begin.compare_exchange_strong(free, static_cast<char*>(memory), std::memory_order_relaxed)) continue;
    return pinned.size.store(size, std::memory_order_relaxed);
  }
  std::abort();  // more allocations than the table has
}

namespace {

// Stricter than CUDA's documentation. PyTorch, CUDAEvent.h: cudaEventRecord and cudaStreamWaitEvent "must be called on
// the same device as" the event or stream.
cudaError_t CheckDevice(const char* name, const CUstream_st& stream) {
  if (stream.device == current_device) return cudaSuccess;
  return Forbidden(cudaErrorInvalidResourceHandle, std::string(name) + " on a stream of another device");
}

// CUDA may synchronize all devices first, and they may be waiting for this thread.
void NoteAllocation(const char* name) {
  if (is_executing) static_cast<void>(Forbidden(cudaSuccess, std::string(name) + " while a program runs"));
}

}  // namespace

StandIn& TheStandIn() { return TheState().options; }

void FailCalls(const std::string& function, int64_t after, cudaError_t error, int64_t count) {
  for (Function& one : TheState().functions) one.fails_from = one.fails_until = -1;
  if (function.empty()) return;
  // The table keeps the name.
  static auto* const names = new std::set<std::string>;
  Function& failing = FunctionOf(names->insert(function).first->c_str());
  failing.error = static_cast<int>(error);
  const int64_t from = failing.calls + after;
  failing.fails_until = from + count;
  failing.fails_from = from;
}

void Launch(cudaStream_t stream, std::function<void()> kernel) {
  const DriverLock lock(false);
  stream->Push(std::move(kernel));
}

void Corrupt(cudaError_t error) {
  TheState().corrupt.store(static_cast<int>(error), std::memory_order_relaxed);
  Progress().Ring();
}

bool IsCorrupt() { return TheState().corrupt.load(std::memory_order_relaxed) != 0; }

Capture::Capture(cudaStream_t stream) : stream_(stream) {
  captured = stream;
  capture_failed = false;
  stream->Record(&recorded_);
}

Capture::~Capture() { static_cast<void>(End()); }

cudaError_t Capture::End() {
  if (std::exchange(ended_, true)) return cudaSuccess;
  stream_->Record(nullptr);
  captured = nullptr;
  return capture_failed ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
}

void Capture::Replay() const {
  for (const auto& work : recorded_) stream_->Push(work);
}

Executing::Executing() { is_executing = true; }
Executing::~Executing() { is_executing = false; }

void Synchronize(cudaStream_t stream) { stream->Wait(); }

std::vector<std::string> Violations() {
  const std::lock_guard<std::mutex> lock(TheState().mutex);
  return TheState().violations;
}

std::set<int> Contexts() {
  std::set<int> devices;
  for (int device = 0; device < 64; ++device) {
    if ((TheState().contexts >> device & 1) != 0) devices.insert(device);
  }
  return devices;
}

int CurrentDevice() { return current_device; }

int64_t NumEvents() { return TheState().num_events; }

int64_t PinnedBytes() {
  size_t bytes = 0;
  for (const Pinned& pinned : TheState().pinned) bytes += pinned.begin != nullptr ? pinned.size.load() : 0;
  return static_cast<int64_t>(bytes);
}

int64_t NumCalls(const std::string& function) {
  for (const Function& one : TheState().functions) {
    const char* const name = one.name;
    if (name != nullptr && function == name) return one.calls;
  }
  return 0;
}

std::vector<CallPlace> OrderingCalls() {
  std::vector<CallPlace> calls;
  for (const Place& place : TheState().places) {
    if (place.function != nullptr) calls.push_back({place.function, place.returns_to});
  }
  return calls;
}

void Ignore(const CallPlace& place) { TheState().ignored = place.returns_to; }

}  // namespace moe_lb::testing

// ---- the runtime's functions -------------------------------------------------------

using namespace moe_lb::testing;

// Entry of ordering calls.
#define MOE_LB_ENTER_ORDERING(name) \
  MOE_LB_ENTER(name);               \
  if (IsIgnored(name, __builtin_return_address(0))) return cudaSuccess

extern "C" {

cudaError_t cudaGetLastError() {
  const int corrupt = TheState().corrupt.load(std::memory_order_relaxed);
  return corrupt != 0 ? static_cast<cudaError_t>(corrupt) : std::exchange(last_error, cudaSuccess);
}

cudaError_t cudaGetDevice(int* device) {
  MOE_LB_ENTER("cudaGetDevice");
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  MOE_LB_ENTER("cudaSetDevice");
  if (device < 0 || device >= NumDevices()) return Fail(cudaErrorInvalidDevice);
  current_device = device;
  NoteContext();
  return cudaSuccess;
}

// ---- streams and events ----

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  MOE_LB_ENTER("cudaStreamCreateWithFlags");
  NoteAllocation("cudaStreamCreateWithFlags");
  // CUDA Runtime API, Stream synchronization behavior: another stream waits for work of the legacy default stream.
  if (flags != cudaStreamNonBlocking)
    return Forbidden(cudaErrorInvalidValue, "a stream that waits for the default one");
  *stream = new CUstream_st(current_device);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  MOE_LB_ENTER("cudaStreamDestroy");
  stream->End();
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  MOE_LB_ENTER_ORDERING("cudaStreamQuery");
  return stream->IsIdle() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  MOE_LB_ENTER_ORDERING("cudaStreamSynchronize");
  stream->Wait();
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  MOE_LB_ENTER_ORDERING("cudaStreamWaitEvent");
  // CUDA Runtime API, Data types, cudaErrorStreamCaptureIsolation: a dependency between captured and other work.
  if (event->capture.load(std::memory_order_relaxed) != stream->capture()) {
    return Forbidden(cudaErrorStreamCaptureIsolation, "cudaStreamWaitEvent between captured and other work");
  }
  if (const cudaError_t bad = CheckDevice("cudaStreamWaitEvent", *stream); bad != cudaSuccess) return bad;
  const uint64_t ticket = TicketOf(*event);
  // CUDA treats it as a completed wait, which is an error in a handler.
  if (ticket == 0) return Forbidden(cudaSuccess, "cudaStreamWaitEvent for an event that was never recorded");
  stream->Push([event, ticket] { Progress().Until([=] { return IsReached(*event, ticket) || IsCorrupt(); }); });
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  MOE_LB_ENTER("cudaEventCreateWithFlags");
  // CUDA Runtime API, Event Management, cudaEventCreateWithFlags: without timing an event "will provide the best
  // performance when used with cudaStreamWaitEvent() and cudaEventQuery()".
  if ((flags & cudaEventDisableTiming) == 0) return Forbidden(cudaErrorInvalidValue, "an event with timing");
  *event = new CUevent_st(current_device);
  (*event)->next = TheState().events.exchange(*event, std::memory_order_relaxed);
  TheState().num_events.fetch_add(1, std::memory_order_relaxed);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t) {
  MOE_LB_ENTER("cudaEventDestroy");
  TheState().num_events.fetch_sub(1, std::memory_order_relaxed);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  MOE_LB_ENTER_ORDERING("cudaEventRecord");
  if (event->device != stream->device) {
    return Forbidden(cudaErrorInvalidResourceHandle, "cudaEventRecord: the event and the stream have other devices");
  }
  if (const cudaError_t bad = CheckDevice("cudaEventRecord", *stream); bad != cudaSuccess) return bad;
  event->capture.store(stream->capture(), std::memory_order_relaxed);
  const uint64_t ticket = event->recorded.fetch_add(1, std::memory_order_relaxed) + 1;
  stream->Push([event, ticket] {
    event->reached.store(ticket, std::memory_order_release);
    Progress().Ring();
  });
  return cudaSuccess;
}
// Event Management, cudaEventElapsedTime: of an event without timing "cudaErrorInvalidResourceHandle is returned".
cudaError_t cudaEventElapsedTime(float*, cudaEvent_t, cudaEvent_t) {
  MOE_LB_ENTER("cudaEventElapsedTime");
  return Forbidden(cudaErrorInvalidResourceHandle, "cudaEventElapsedTime of an event without timing");
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  MOE_LB_ENTER_ORDERING("cudaEventQuery");
  if (event->capture.load(std::memory_order_relaxed) != nullptr) {
    return Forbidden(cudaErrorCapturedEvent, "cudaEventQuery of a captured event");
  }
  return IsReached(*event, TicketOf(*event)) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  MOE_LB_ENTER_ORDERING("cudaEventSynchronize");
  const uint64_t ticket = TicketOf(*event);
  Progress().Until([&] { return IsReached(*event, ticket) || IsCorrupt(); });
  return cudaSuccess;
}

// ---- copies ----

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind kind, cudaStream_t stream) {
  MOE_LB_ENTER("cudaMemcpyAsync");
  // CUDA would block the host until the stream completes it.
  if (kind == cudaMemcpyDeviceToHost && !IsPinned(to, size)) return Forbidden(cudaSuccess, "copy to memory not pinned");
  if (kind == cudaMemcpyHostToDevice && !IsPinned(from, size)) {
    return Forbidden(cudaSuccess, "copy from memory not pinned");
  }
  const StandIn& options = TheStandIn();
  const int64_t us = kind == cudaMemcpyDefault        ? options.copy_us
                     : kind == cudaMemcpyDeviceToHost ? options.fetch_us
                                                      : 0;
  const DriverLock lock(false);
  stream->Push([=] {
    Sleep(us);
    std::memcpy(to, from, size);
  });
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t stream) {
  MOE_LB_ENTER("cudaMemsetAsync");
  const DriverLock lock(false);
  stream->Push([=] { std::memset(to, value, size); });
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** memory, size_t size, unsigned) {
  MOE_LB_ENTER("cudaHostAlloc");
  NoteAllocation("cudaHostAlloc");
  const DriverLock lock(true);
  char* const begin = static_cast<char*>(std::malloc(size));
  *memory = begin;
  AddPinned(begin, size);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* memory) {
  MOE_LB_ENTER("cudaFreeHost");
  NoteAllocation("cudaFreeHost");
  const DriverLock lock(true);
  for (Pinned& pinned : TheState().pinned) {
    if (pinned.begin.load(std::memory_order_relaxed) == memory) pinned.begin.store(nullptr, std::memory_order_relaxed);
  }
  std::free(memory);
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  MOE_LB_ENTER("cudaLaunchHostFunc");
  const DriverLock lock(false);
  stream->Push([=] {
    in_host_function = true;
    function(argument);
    in_host_function = false;
  });
  return cudaSuccess;
}

}  // extern "C"
