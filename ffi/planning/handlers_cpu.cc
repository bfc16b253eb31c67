// Planners of CPU devices, computed in the handler: the counts are in host memory.
#include "ffi/common/handler.h"
#include "ffi/planning/handlers.h"
#include "ffi/planning/planners.h"

namespace moe_lb {
namespace {

namespace xf = xla::ffi;

xf::Error PlanNow(const PlannerCall& call, StatusResult& status) {
  if (status->element_count() != 1) return xf::Error::InvalidArgument("status is not of shape [1]");
  // The status word is for GPUs, whose planners cannot return an error. A failure here is an error, and the word is
  // always 0.
  status->typed_data()[0] = 0;
  return ToError(Attempt(call, call.operands, call.results));
}

// Handler of a planner: `make_call` takes the planner's arguments.
template <auto make_call>
struct OnCpu;

template <typename... Args, PlannerCall (*make_call)(Args...)>
struct OnCpu<make_call> {
  static xf::Error Run(Args... args, StatusResult status) { return PlanNow(make_call(args...), status); }
};

XLA_FFI_DEFINE_HANDLER(kGreedy, OnCpu<GreedyCall>::Run, BindingOf(GreedyCall));
XLA_FFI_DEFINE_HANDLER(kEplbPlus, OnCpu<EplbPlusCall>::Run, BindingOf(EplbPlusCall));
XLA_FFI_DEFINE_HANDLER(kFeplb, OnCpu<FeplbCall>::Run, BindingOf(FeplbCall));
XLA_FFI_DEFINE_HANDLER(kFasterMoe, OnCpu<FasterMoeCall>::Run, BindingOf(FasterMoeCall));
XLA_FFI_DEFINE_HANDLER(kUltraEp, OnCpu<UltraEpCall>::Run, BindingOf(UltraEpCall));
XLA_FFI_DEFINE_HANDLER(kRelay, OnCpu<RelayCall>::Run, BindingOf(RelayCall));
XLA_FFI_DEFINE_HANDLER(kSpray, OnCpu<SprayCall>::Run, BindingOf(SprayCall));
XLA_FFI_DEFINE_HANDLER(kExact, OnCpu<ExactCall>::Run, BindingOf(ExactCall));

}  // namespace

Registrations PlanningRegistrations() {
  return {{},
          {{"moe_lb_plan_greedy", kGreedy},
           {"moe_lb_plan_eplb_plus", kEplbPlus},
           {"moe_lb_plan_feplb", kFeplb},
           {"moe_lb_plan_fastermoe", kFasterMoe},
           {"moe_lb_plan_ultraep", kUltraEp},
           {"moe_lb_plan_relay", kRelay},
           {"moe_lb_plan_spray", kSpray},
           {"moe_lb_plan_exact", kExact}}};
}

}  // namespace moe_lb
