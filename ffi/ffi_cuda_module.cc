// jax_moe_lb._ffi_cuda: the custom calls of NVIDIA GPUs, under the names that the CPU's have.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>

#include "ffi/common/driver_cuda.h"
#include "ffi/common/module.h"
#include "ffi/planning/handlers.h"
#include "ffi/transport/peer_handlers.h"
#include "ffi/transport/peer_planning.h"

NB_MODULE(_ffi_cuda, module) {
  module.doc() = "XLA custom calls of jax_moe_lb for NVIDIA GPUs; jax_moe_lb._custom_calls registers them";
  module.def(
      "registrations",
      [] {
        return moe_lb::AsPython(
            {moe_lb::PlanningRegistrations(), moe_lb::PeerRegistrations(), moe_lb::PeerPlanningRegistrations()});
      },
      "State types and handlers, as capsules");
  module.def(
      "why_unusable", []() -> std::optional<std::string> { return moe_lb::CheckDriver(); },
      "Why they cannot run with this machine's driver, if they cannot");
}
