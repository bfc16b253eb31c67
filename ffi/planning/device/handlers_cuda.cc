// Planners of GPU devices as kernels of the stream, without the host.
#include <algorithm>
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

// More would not change a choice among plans, and the number of blocks must fit int32.
constexpr size_t kMostPlans = 64;

bool IsDomain(int64_t domain, size_t ranks) { return domain >= 1 && static_cast<int64_t>(ranks) % domain == 0; }

bool HasShape(MatrixView<int32_t> array, size_t rows, size_t columns) {
  return array.rows() == rows && array.columns() == columns;
}

xf::Error Exact(Matrix counts, Vector limits, FromAttributes<ExactDomainsOptions> options, MatrixResult placement,
                MatrixResult quota, StatusResult status, cudaStream_t stream) {
  constexpr const char* kName = "moe_lb_plan_exact_kernel";
  const auto in = In(counts), most = In(limits);
  const auto slots = Out(placement), amounts = Out(quota);
  const size_t ranks = in.rows(), experts = in.columns(), plans = most.columns();
  const bool fits = ranks >= 1 && experts >= 1 && experts % ranks == 0 && IsDomain(options.domain, ranks) &&
                    plans >= 1 && plans <= kMostPlans && slots.rows() == plans * ranks &&
                    slots.columns() >= experts / ranks && HasShape(amounts, plans * experts, ranks) &&
                    status->element_count() == 1;
  if (!fits || CheckOptions(options)) return Mismatch(kName);
  device::ExactCall call = device::ExactOf(in, most.flat(), options, slots, amounts, status->typed_data());
  if (!device::Fit(&call, options.domain)) return TooLarge(kName);
  return LaunchCall(kName, call, stream);
}

xf::Error UltraEpKernel(Matrix placement, Matrix quota, FromAttributes<UltraEpOptions> options,
                        MatrixResult new_placement, MatrixResult new_quota, StatusResult status, cudaStream_t stream) {
  constexpr const char* kName = "moe_lb_plan_ultraep_kernel";
  const auto in = In(placement), amounts = In(quota);
  const auto out = Out(new_placement), new_amounts = Out(new_quota);
  const size_t ranks = in.rows(), slots = in.columns(), experts = amounts.rows();
  const bool fits = ranks >= 1 && slots >= 1 && experts >= 1 && experts % ranks == 0 &&
                    IsDomain(options.domain, ranks) && amounts.columns() == ranks && HasShape(out, ranks, slots) &&
                    HasShape(new_amounts, experts, ranks) && status->element_count() == 1;
  if (!fits || CheckOptions(options)) return Mismatch(kName);
  const device::EditCall plan = device::EditOf(in, amounts, options.domain, out, new_amounts, status->typed_data());
  const device::UltraEpCall call = {plan, options};
  if (!device::Fit(call)) return TooLarge(kName);
  return LaunchCall(kName, call, stream);
}

xf::Error RelayKernel(Matrix placement, FromAttributes<RelayOptions> options, MatrixResult relay, StatusResult status,
                      cudaStream_t stream) {
  constexpr const char* kName = "moe_lb_plan_relay_kernel";
  const auto in = In(placement);
  const auto out = Out(relay);
  const bool fits = in.rows() >= 1 && options.num_home >= 1 && options.num_home <= static_cast<int64_t>(in.columns()) &&
                    HasShape(out, in.rows(), in.columns()) && status->element_count() == 1;
  if (!fits || CheckOptions(options)) return Mismatch(kName);
  const device::RelayCall call = device::RelayOf(in, options, out, status->typed_data());
  if (!device::Fit(call)) return TooLarge(kName);
  return LaunchCall(kName, call, stream);
}

template <typename Binding>
auto OnStream(Binding binding) {
  return std::move(binding).template Ctx<xf::PlatformStream<cudaStream_t>>();
}

// These only launch on the stream, so a CUDA graph may record them.
XLA_FFI_DEFINE_HANDLER(
    kExact, Exact,
    OnStream(Bound<Matrix, Vector, FromAttributes<ExactDomainsOptions>, MatrixResult, MatrixResult>(xf::Ffi::Bind())),
    {xf::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kUltraEp, UltraEpKernel, OnStream(BindingOf(UltraEpCall)), {xf::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kRelay, RelayKernel, OnStream(BindingOf(RelayCall)), {xf::Traits::kCmdBufferCompatible});

}  // namespace

Registrations PlanningKernelRegistrations() {
  return {{},
          {{"moe_lb_plan_exact_kernel", kExact},
           {"moe_lb_plan_ultraep_kernel", kUltraEp},
           {"moe_lb_plan_relay_kernel", kRelay}}};
}

// False also for sizes that no plan has.
static bool AreSizes(int64_t ranks, int64_t experts, int64_t slots, int64_t domain) {
  return std::min({ranks, experts, slots, domain}) >= 1 &&
         experts <= std::numeric_limits<int32_t>::max() / slots / ranks;
}

bool ExactKernelFits(int64_t ranks, int64_t experts, int64_t slots, int64_t domain, double eps, bool localize) {
  device::ExactCall call = {};
  if (!AreSizes(ranks, experts, slots, domain)) return false;
  call.all_ranks = static_cast<int>(ranks);
  call.all_experts = static_cast<int>(experts);
  call.all_slots = static_cast<int>(slots);
  call.eps = eps;
  call.localize = localize;
  return device::Fit(&call, domain);
}

bool KernelFits(const std::string& planner, int64_t ranks, int64_t experts, int64_t slots, int64_t domain) {
  if (!AreSizes(ranks, experts, slots, domain)) return false;
  const auto num_ranks = static_cast<size_t>(ranks), num_slots = static_cast<size_t>(slots);
  const device::EditCall plan =
      device::EditOf({nullptr, num_ranks, num_slots}, {nullptr, static_cast<size_t>(experts), num_ranks}, domain,
                     {nullptr, num_ranks, num_slots}, {nullptr, 0, 0}, nullptr);
  if (planner == "ultraep") return device::Fit(device::UltraEpCall{plan, {}});
  if (planner == "relay") {
    return device::Fit(device::RelayOf({nullptr, num_ranks, num_slots}, {experts / ranks}, {nullptr, 0, 0}, nullptr));
  }
  return false;
}

}  // namespace moe_lb
