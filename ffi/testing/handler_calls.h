// Calls of XLA FFI handlers without XLA: operands, attributes, and one call at a time, with any frame.
//
// Stricter than XLA to expose bugs: every buffer is an allocation of exactly its size and is freed when its own call
// completes, while calls of other devices may still run. GPU handlers return while their work is queued, so an
// `Invocation` leaves the buffers to its caller.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "ffi/common/registrations.h"
#include "xla/ffi/api/c_api.h"

namespace moe_lb::testing {

// Bytes of one element, as XLA stores it.
size_t ByteWidth(XLA_FFI_DataType dtype);

// An operand or a result; `bytes` has the size of dtype and dims.
struct Array {
  XLA_FFI_DataType dtype = XLA_FFI_DataType_S32;
  std::vector<int64_t> dims;
  std::vector<unsigned char> bytes;

  size_t size() const;
  void Resize() { bytes.resize(size() * ByteWidth(dtype)); }
};

struct Attribute {
  XLA_FFI_AttrType type = XLA_FFI_AttrType_SCALAR;
  XLA_FFI_DataType dtype = XLA_FFI_DataType_S64;  // of a scalar or array
  std::vector<unsigned char> bytes;               // of a scalar, array or string
  std::vector<std::string> keys;                  // of a dictionary, sorted
  std::vector<Attribute> values;
};

using Attributes = std::map<std::string, Attribute>;

// Operands of one device.
struct Operands {
  std::vector<Array> args;
  std::vector<Array> rets;
  std::map<size_t, size_t> aliases;  // argument index to the index of the aliased result
};

std::string Describe(const Attributes& attributes);
std::string Describe(const Operands& operands);

// Result of a call.
struct Ending {
  bool ok = true;
  XLA_FFI_Error_Code code = XLA_FFI_Error_Code_OK;
  std::string message;
  bool wrote_argument = false;  // true if the handler wrote an unaliased argument
  std::vector<Array> rets;      // on success
};

// Execution of tasks by the runtime's thread pool.
enum class PoolMode { kThreads, kInline, kNone };

class FakeXla;

// One execution of a call on one device.
class Execution {
 public:
  // Returns the ending, or nullopt if the call does not end within `limit`.
  std::optional<Ending> Wait(std::chrono::milliseconds limit);
  bool is_over();

 private:
  friend class CallSite;
  struct Buffers;

  void Complete(XLA_FFI_Error* error);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Ending> ending_;
  std::unique_ptr<Buffers> buffers_;
};

// One call in one executable. All its executions must have ended before its destruction.
class CallSite {
 public:
  CallSite(FakeXla& xla, const HandlerRegistration& handler, const Attributes& attributes);
  ~CallSite();
  CallSite(const CallSite&) = delete;
  CallSite& operator=(const CallSite&) = delete;

  // Ending of the instantiate stage; do not execute after a failure.
  const Ending& instantiated() const { return instantiated_; }

  // Calls the handler on this thread. The execution may end before or after the return.
  std::shared_ptr<Execution> Execute(const Operands& operands, int64_t run_id, int32_t device, PoolMode pool);

 private:
  friend class Invocation;
  class AttributesFrame;

  FakeXla& xla_;
  const HandlerRegistration handler_;
  std::unique_ptr<AttributesFrame> attributes_;
  XLA_FFI_TypeId state_type_{0};
  void* state_ = nullptr;
  Ending instantiated_;
};

// An argument or result in memory of the caller.
struct DeviceArray {
  XLA_FFI_DataType dtype = XLA_FFI_DataType_S32;
  std::vector<int64_t> dims;
  void* data = nullptr;

  size_t size_bytes() const;
};
using DeviceArrays = std::vector<DeviceArray>;

// A call in one execution of a program on one device with a stream, as XLA:GPU makes it: the initialize stage, the
// handler any number of times (several in a loop), then the destruction of the state of the initialize stage. XLA
// destroys the state whether or not the program failed, and frees the program's buffers after it.
class Invocation {
 public:
  Invocation(CallSite& site, DeviceArrays args, DeviceArrays rets, int64_t run_id, int32_t device, void* stream);
  ~Invocation();
  Invocation(const Invocation&) = delete;
  Invocation& operator=(const Invocation&) = delete;

  // Ending of the initialize stage; do not execute after a failure.
  const Ending& initialized() const { return initialized_; }

  // Calls the handler on this thread.
  Ending Execute() { return Run(XLA_FFI_ExecutionStage_EXECUTE); }

 private:
  Ending Run(XLA_FFI_ExecutionStage stage);

  CallSite& site_;
  DeviceArrays args_;
  DeviceArrays rets_;
  const int64_t run_id_;
  const int32_t device_;
  void* const stream_;
  XLA_FFI_TypeId state_type_{0};
  void* state_ = nullptr;
  Ending initialized_;
};

}  // namespace moe_lb::testing
