// Planners of GPU devices, computed on the CPU in a host function of the stream.
#include <memory>

#include "ffi/planning/handlers.h"
#include "ffi/planning/host_scheduler_cuda.h"
#include "ffi/planning/planners.h"

namespace moe_lb {
namespace {

namespace xf = xla::ffi;

// These handlers must not be recorded into a command buffer: a replay would run the host function without reserving a
// slot, perhaps one in use by another call.
XLA_FFI_DEFINE_HANDLER(
    kInstantiate, []() -> xf::ErrorOr<std::unique_ptr<HostScheduler>> { return std::make_unique<HostScheduler>(); },
    xf::Ffi::BindInstantiate());

// Every array of a planner is int32.
xf::Error Initialize(HostScheduler* scheduler, xf::RemainingArgs args, xf::RemainingRets rets) {
  size_t words = 0;
  for (size_t i = 0; i < args.size(); ++i) words += args.get<xf::AnyBuffer>(i)->element_count();
  for (size_t i = 0; i < rets.size(); ++i) words += (*rets.get<xf::AnyBuffer>(i))->element_count();
  return scheduler->Prepare(words);
}

XLA_FFI_DEFINE_HANDLER(kInitialize, Initialize,
                       xf::Ffi::BindInitialize().Ctx<xf::State<HostScheduler>>().RemainingArgs().RemainingRets());

template <typename Binding>
auto OnStream(Binding binding) {
  return std::move(binding).template Ctx<xf::PlatformStream<cudaStream_t>>().template Ctx<xf::State<HostScheduler>>();
}

// Handler of a planner: `make_call` takes the planner's arguments.
template <auto make_call>
struct OnCuda;

template <typename... Args, PlannerCall (*make_call)(Args...)>
struct OnCuda<make_call> {
  static xf::Error Run(Args... args, StatusResult status, cudaStream_t stream, HostScheduler* scheduler) {
    if (status->element_count() != 1) return xf::Error::InvalidArgument("status is not of shape [1]");
    return scheduler->Enqueue(stream, make_call(args...), status->typed_data());
  }
};

XLA_FFI_DEFINE_HANDLER(kGreedy, OnCuda<GreedyCall>::Run, OnStream(BindingOf(GreedyCall)));
XLA_FFI_DEFINE_HANDLER(kEplbPlus, OnCuda<EplbPlusCall>::Run, OnStream(BindingOf(EplbPlusCall)));
XLA_FFI_DEFINE_HANDLER(kFeplb, OnCuda<FeplbCall>::Run, OnStream(BindingOf(FeplbCall)));
XLA_FFI_DEFINE_HANDLER(kFasterMoe, OnCuda<FasterMoeCall>::Run, OnStream(BindingOf(FasterMoeCall)));
XLA_FFI_DEFINE_HANDLER(kUltraEp, OnCuda<UltraEpCall>::Run, OnStream(BindingOf(UltraEpCall)));
XLA_FFI_DEFINE_HANDLER(kRelay, OnCuda<RelayCall>::Run, OnStream(BindingOf(RelayCall)));
XLA_FFI_DEFINE_HANDLER(kSpray, OnCuda<SprayCall>::Run, OnStream(BindingOf(SprayCall)));
XLA_FFI_DEFINE_HANDLER(kExact, OnCuda<ExactCall>::Run, OnStream(BindingOf(ExactCall)));

constexpr XLA_FFI_TypeInfo kSchedulerInfo = xf::MakeTypeInfo<HostScheduler>();

}  // namespace

Registrations PlanningRegistrations() {
  return {{{"moe_lb_host_scheduler", &HostScheduler::id, &kSchedulerInfo}},
          {{"moe_lb_plan_greedy", kGreedy, kInstantiate, kInitialize},
           {"moe_lb_plan_eplb_plus", kEplbPlus, kInstantiate, kInitialize},
           {"moe_lb_plan_feplb", kFeplb, kInstantiate, kInitialize},
           {"moe_lb_plan_fastermoe", kFasterMoe, kInstantiate, kInitialize},
           {"moe_lb_plan_ultraep", kUltraEp, kInstantiate, kInitialize},
           {"moe_lb_plan_relay", kRelay, kInstantiate, kInitialize},
           {"moe_lb_plan_spray", kSpray, kInstantiate, kInitialize},
           {"moe_lb_plan_exact", kExact, kInstantiate, kInitialize}}};
}

}  // namespace moe_lb
