// Planners of GPU devices as kernels of the stream, without the host.
#include <cmath>
#include <limits>
#include <string>

#include "ffi/planning/device/launch.h"
#include "ffi/planning/handlers.h"
#include "ffi/planning/planners.h"

namespace moe_lb {
namespace {

namespace xf = xla::ffi;

// Launches a planner whose call matches its arrays and options and fits into a block.
template <typename Call>
xf::Error LaunchCall(const char* name, const Call& call, cudaStream_t stream) {
  const cudaError_t error = device::Launch(call, stream);
  if (error == cudaSuccess) return xf::Error::Success();
  return xf::Error::Internal(std::string(name) + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

xf::Error Mismatch(const char* name) {
  return xf::Error::InvalidArgument(std::string(name) + ": shapes or options do not match");
}

xf::Error TooLarge(const char* name) {
  return xf::Error::InvalidArgument(std::string(name) + ": the domain does not fit into shared memory");
}

bool IsDomain(int64_t domain, size_t ranks) { return domain >= 1 && static_cast<int64_t>(ranks) % domain == 0; }

bool HasShape(MatrixView<int32_t> array, size_t rows, size_t columns) {
  return array.rows() == rows && array.columns() == columns;
}

xf::Error Exact(Matrix counts, int64_t domain, double eps, int64_t max_fan_out, bool localize, MatrixResult placement,
                MatrixResult quota, StatusResult status, cudaStream_t stream) {
  constexpr const char* kName = "moe_lb_plan_exact_kernel";
  const auto in = In(counts);
  const auto slots = Out(placement), amounts = Out(quota);
  const size_t ranks = in.rows(), experts = in.columns();
  const bool fits = ranks >= 1 && experts >= 1 && experts % ranks == 0 && IsDomain(domain, ranks) &&
                    slots.rows() == ranks && slots.columns() >= experts / ranks && HasShape(amounts, experts, ranks) &&
                    status->element_count() == 1;
  if (!fits || !(eps >= 0) || std::isinf(eps) || max_fan_out < 0) return Mismatch(kName);
  device::ExactCall call = device::ExactOf(in, {eps, max_fan_out, localize}, slots, amounts, status->typed_data());
  if (!device::Fit(&call, domain)) return TooLarge(kName);
  return LaunchCall(kName, call, stream);
}

// ---- Planners that edit a plan -----------------------------------------------------

// The arrays of such a planner.
struct Edit {
  MatrixView<const int32_t> placement, quota;
  MatrixView<int32_t> new_placement, new_quota;
  StatusResult status;
};

// Launches `make(plan)`, a call for the arrays, if they match each other and the options are good.
template <typename Make>
xf::Error LaunchEdit(const char* name, Edit edit, int64_t domain, bool is_good, cudaStream_t stream, const Make& make) {
  const size_t ranks = edit.placement.rows(), slots = edit.placement.columns(), experts = edit.quota.rows();
  const bool fits = ranks >= 1 && slots >= 1 && experts >= 1 && experts % ranks == 0 && IsDomain(domain, ranks) &&
                    edit.quota.columns() == ranks && HasShape(edit.new_placement, ranks, slots) &&
                    HasShape(edit.new_quota, experts, ranks) && edit.status->element_count() == 1;
  if (!fits || !is_good) return Mismatch(name);
  auto call = make(device::EditOf(edit.placement, edit.quota, domain, edit.new_placement, edit.new_quota,
                                  edit.status->typed_data()));
  if (!device::Fit(&call)) return TooLarge(name);
  return LaunchCall(name, call, stream);
}

xf::Error GreedyKernel(Matrix placement, Matrix quota, int64_t domain, int64_t min_tokens, MatrixResult new_placement,
                       MatrixResult new_quota, StatusResult status, cudaStream_t stream) {
  const Edit edit = {In(placement), In(quota), Out(new_placement), Out(new_quota), status};
  return LaunchEdit("moe_lb_plan_greedy_kernel", edit, domain, min_tokens >= 1, stream,
                    [=](const device::EditCall& plan) { return device::GreedyOf(plan, min_tokens); });
}

xf::Error UltraEpKernel(Matrix placement, Matrix quota, int64_t domain, float eps, int64_t min_tokens,
                        MatrixResult new_placement, MatrixResult new_quota, StatusResult status, cudaStream_t stream) {
  const Edit edit = {In(placement), In(quota), Out(new_placement), Out(new_quota), status};
  return LaunchEdit("moe_lb_plan_ultraep_kernel", edit, domain, eps >= 0 && eps <= 1 && min_tokens >= 1, stream,
                    [=](const device::EditCall& plan) { return device::UltraEpOf(plan, eps, min_tokens); });
}

xf::Error FeplbKernel(Matrix placement, Matrix quota, int64_t domain, int64_t num_dynamic, int64_t max_num_dyn,
                      int64_t tau, bool skip, MatrixResult new_placement, MatrixResult new_quota, StatusResult status,
                      cudaStream_t stream) {
  const Edit edit = {In(placement), In(quota), Out(new_placement), Out(new_quota), status};
  const FeplbOptions options = {domain, num_dynamic, max_num_dyn, tau, skip};
  const bool is_good = num_dynamic >= 1 && max_num_dyn >= 1 && tau >= 1 && tau <= std::numeric_limits<int32_t>::max();
  return LaunchEdit("moe_lb_plan_feplb_kernel", edit, domain, is_good, stream,
                    [&](const device::EditCall& plan) { return device::FeplbOf(plan, options); });
}

xf::Error RelayKernel(Matrix placement, int64_t num_home, int64_t min_replicas, int64_t max_relays, int64_t min_gain,
                      MatrixResult relay, StatusResult status, cudaStream_t stream) {
  constexpr const char* kName = "moe_lb_plan_relay_kernel";
  const auto in = In(placement);
  const auto out = Out(relay);
  const bool fits = in.rows() >= 1 && num_home >= 1 && num_home <= static_cast<int64_t>(in.columns()) &&
                    HasShape(out, in.rows(), in.columns()) && status->element_count() == 1;
  if (!fits || min_replicas < 2 || max_relays < 1 || min_gain < 1) return Mismatch(kName);
  device::RelayCall call =
      device::RelayOf(in, num_home, {min_replicas, max_relays, min_gain}, out, status->typed_data());
  if (!device::Fit(&call)) return TooLarge(kName);
  return LaunchCall(kName, call, stream);
}

template <typename Binding>
auto OnStream(Binding binding) {
  return std::move(binding).template Ctx<xf::PlatformStream<cudaStream_t>>();
}

// These only launch on the stream, so a CUDA graph may record them.
XLA_FFI_DEFINE_HANDLER(kExact, Exact, OnStream(ExactBinding()), {xf::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kGreedy, GreedyKernel, OnStream(GreedyBinding()), {xf::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kUltraEp, UltraEpKernel, OnStream(UltraEpBinding()), {xf::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kFeplb, FeplbKernel, OnStream(FeplbBinding()), {xf::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kRelay, RelayKernel, OnStream(RelayBinding()), {xf::Traits::kCmdBufferCompatible});

}  // namespace

Registrations PlanningKernelRegistrations() {
  return {{},
          {{"moe_lb_plan_exact_kernel", kExact},
           {"moe_lb_plan_greedy_kernel", kGreedy},
           {"moe_lb_plan_ultraep_kernel", kUltraEp},
           {"moe_lb_plan_feplb_kernel", kFeplb},
           {"moe_lb_plan_relay_kernel", kRelay}}};
}

bool ExactKernelFits(int64_t ranks, int64_t experts, int64_t slots, int64_t domain, double eps, bool localize) {
  device::ExactCall call = {};
  if (experts * slots * ranks > std::numeric_limits<int32_t>::max()) return false;
  call.all_ranks = static_cast<int>(ranks);
  call.all_experts = static_cast<int>(experts);
  call.all_slots = static_cast<int>(slots);
  call.eps = eps;
  call.localize = localize;
  return device::Fit(&call, domain);
}

bool KernelFits(const std::string& planner, int64_t ranks, int64_t experts, int64_t slots, int64_t domain) {
  if (experts * slots * ranks > std::numeric_limits<int32_t>::max()) return false;
  const auto num_ranks = static_cast<size_t>(ranks), num_slots = static_cast<size_t>(slots);
  const device::EditCall plan =
      device::EditOf({nullptr, num_ranks, num_slots}, {nullptr, static_cast<size_t>(experts), num_ranks}, domain,
                     {nullptr, num_ranks, num_slots}, {nullptr, 0, 0}, nullptr);
  const auto fits = [](auto call) { return device::Fit(&call); };
  if (planner == "greedy") return fits(device::GreedyOf(plan, 1));
  if (planner == "ultraep") return fits(device::UltraEpOf(plan, 0, 1));
  if (planner == "feplb") return fits(device::FeplbOf(plan, {domain, 1, 1, 1, false}));
  if (planner == "relay") {
    return fits(device::RelayOf({nullptr, num_ranks, num_slots}, experts / ranks, {}, {nullptr, 0, 0}, nullptr));
  }
  return false;
}

}  // namespace moe_lb
