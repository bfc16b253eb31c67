// A nanobind module that hands handlers and state types to JAX.
#pragma once

#include <nanobind/nanobind.h>

#include <initializer_list>

#include "ffi/common/registrations.h"

namespace moe_lb {

// {"types": {name: {"type_id": capsule, "type_info": capsule}}, "handlers": {name: {stage: capsule}},
//  "api_version": that of the headers, which a jaxlib accepts when its own is the same or newer}
inline nanobind::dict AsPython(std::initializer_list<Registrations> parts) {
  namespace nb = nanobind;
  nb::dict types;
  nb::dict handlers;
  for (const Registrations& part : parts) {
    for (const TypeRegistration& type : part.types) {
      nb::dict entry;
      entry["type_id"] = nb::capsule(static_cast<void*>(type.id));
      // A capsule holds no pointer to const. Nobody writes through it: XLA only reads what the type's functions are.
      entry["type_info"] = nb::capsule(const_cast<void*>(static_cast<const void*>(type.info)));
      types[type.name] = entry;
    }
    for (const HandlerRegistration& handler : part.handlers) {
      nb::dict stages;
      stages["execute"] = nb::capsule(reinterpret_cast<void*>(handler.execute));
      // A stage that is named must exist, so one that a handler lacks is left out.
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
