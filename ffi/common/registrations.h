// Handlers and state types by name, as one list per part of the library; a module hands them to JAX.
#pragma once

#include <vector>

#include "xla/ffi/api/c_api.h"

namespace moe_lb {

struct HandlerRegistration {
  const char* name;
  XLA_FFI_Handler* execute;
  XLA_FFI_Handler* instantiate = nullptr;  // only where the call keeps a state per call site
  XLA_FFI_Handler* initialize = nullptr;   // only where it prepares every execution of a program
};

// A state's type must be registered before the handlers that use it: XLA asks a handler for the type of its state when
// it is registered, and refuses one that it does not know.
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
