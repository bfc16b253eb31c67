// Handlers and state types by name, one list per part of the library; a module passes them to JAX.
#pragma once

#include <vector>

#include "xla/ffi/api/c_api.h"

namespace moe_lb {

struct HandlerRegistration {
  const char* name;
  XLA_FFI_Handler* execute;
  XLA_FFI_Handler* instantiate = nullptr;  // only for calls with state per call site
  XLA_FFI_Handler* initialize = nullptr;   // only for calls preparing every execution of a program
};

// A state's type must be registered before the handlers using it: XLA reads the state type of a handler at its
// registration and rejects unregistered types.
struct TypeRegistration {
  const char* name;
  XLA_FFI_TypeId* id;
  const XLA_FFI_TypeInfo* info;
};

struct Registrations {
  std::vector<TypeRegistration> types;
  std::vector<HandlerRegistration> handlers;
};

}  // namespace moe_lb
