// jax_moe_lb._ffi: the custom calls of the CPU.
#include "ffi/common/module.h"
#include "ffi/gemm/handlers.h"
#include "ffi/planning/handlers.h"
#include "ffi/transport/handlers.h"
#include "ffi/transport/peer_handlers.h"
#include "ffi/transport/peer_planning.h"

NB_MODULE(_ffi, module) {
  module.doc() = "XLA custom calls of jax_moe_lb for CPUs; jax_moe_lb.core.custom_calls registers them";
  module.def(
      "registrations",
      [] {
        return moe_lb::AsPython({moe_lb::PlanningRegistrations(), moe_lb::ExchangeRegistrations(),
                                 moe_lb::PeerRegistrations(), moe_lb::PeerPlanningRegistrations(),
                                 moe_lb::GemmRegistrations()});
      },
      "State types and handlers, as capsules");
}
