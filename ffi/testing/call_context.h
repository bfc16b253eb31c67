// Definitions of opaque structures of XLA's C API, shared by the function table and the calls of handlers.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

#include "ffi/testing/fake_xla.h"
#include "ffi/testing/handler_calls.h"
#include "xla/ffi/api/c_api.h"

struct XLA_FFI_Error {
  XLA_FFI_Error_Code code;
  std::string message;
};

// Owned by the handler and the runtime. The second of `Finish` and `OnReady` deletes it.
struct XLA_FFI_Future {
  std::mutex mutex;
  bool over = false;
  XLA_FFI_Error* error = nullptr;
  std::function<void(XLA_FFI_Error*)> then;
};

namespace moe_lb::testing {

// The context of a call. Its name differs between versions of the headers.
struct Context {
  FakeXla* xla;
  int64_t run_id;
  int32_t device;
  PoolMode pool;
  XLA_FFI_TypeId state_type;  // of the instantiate stage
  void* state;
  void* stream = nullptr;
  XLA_FFI_TypeId initialized_type = {0};  // of the initialize stage
  void* initialized = nullptr;
};

using ContextPointer = decltype(XLA_FFI_State_Get_Args::ctx);

inline Context& ContextOf(ContextPointer ctx) { return *reinterpret_cast<Context*>(ctx); }

// A frame without arguments, results or attributes.
XLA_FFI_CallFrame EmptyFrame(const XLA_FFI_Api* api, XLA_FFI_ExecutionStage stage);

// Deletes the error.
Ending EndingOf(XLA_FFI_Error* error);

// Calls `then` with the future's error (null on success) once a handler sets the future; deletes the future.
void OnReady(XLA_FFI_Future* future, std::function<void(XLA_FFI_Error*)> then);

}  // namespace moe_lb::testing
