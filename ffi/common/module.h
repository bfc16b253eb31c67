// Conversion of registrations to the Python objects registered by JAX.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "ffi/common/registrations.h"

namespace moe_lb {

// {"types": {name: {"type_id": capsule, "type_info": capsule}}, "handlers": {name: {stage: capsule}},
//  "api_version": version of the headers; a jaxlib accepts it if its own is the same or newer}
inline nanobind::dict AsPython(const std::vector<Registrations>& parts) {
  namespace nb = nanobind;
  nb::dict types;
  nb::dict handlers;
  for (const Registrations& part : parts) {
    for (const TypeRegistration& type : part.types) {
      nb::dict entry;
      entry["type_id"] = nb::capsule(static_cast<void*>(type.id));
      // A capsule holds a non-const pointer. XLA only reads the type's functions.
      entry["type_info"] = nb::capsule(const_cast<void*>(static_cast<const void*>(type.info)));
      types[type.name] = entry;
    }
    for (const HandlerRegistration& handler : part.handlers) {
      nb::dict stages;
      stages["execute"] = nb::capsule(reinterpret_cast<void*>(handler.execute));
      // A named stage must exist, so missing stages are left out.
      if (handler.instantiate != nullptr) {
        stages["instantiate"] = nb::capsule(reinterpret_cast<void*>(handler.instantiate));
      }
      if (handler.initialize != nullptr) {
        stages["initialize"] = nb::capsule(reinterpret_cast<void*>(handler.initialize));
      }
      handlers[handler.name] = stages;
    }
  }
  nb::dict all;
  all["types"] = types;
  all["handlers"] = handlers;
  all["api_version"] = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  return all;
}

}  // namespace moe_lb
