// Planners of GPU devices as kernels of the stream, without the host.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "ffi/planning/device/launch.h"
#include "ffi/planning/handlers.h"
#include "ffi/planning/planners.h"

namespace moe_lb {
namespace {

namespace xf = xla::ffi;

xf::Error ToError(cudaError_t error, const char* name) {
  if (error == cudaSuccess) return xf::Error::Success();
  return xf::Error::Internal(std::string(name) + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

xf::Error Exact(Matrix counts, int64_t domain, double eps, int64_t max_fan_out, bool localize, MatrixResult placement,
                MatrixResult quota, StatusResult status, cudaStream_t stream) {
  const auto in = In(counts);
  const auto slots = Out(placement), amounts = Out(quota);
  const size_t ranks = in.rows(), experts = in.columns();
  const bool fits = ranks >= 1 && experts >= 1 && experts % ranks == 0 && domain >= 1 &&
                    static_cast<int64_t>(ranks) % domain == 0 && slots.rows() == ranks &&
                    slots.columns() >= experts / ranks && amounts.rows() == experts && amounts.columns() == ranks &&
                    status->element_count() == 1;
  if (!fits || !(eps >= 0) || std::isinf(eps) || max_fan_out < 0) {
    return xf::Error::InvalidArgument("moe_lb_plan_exact_kernel: shapes or options do not match");
  }
  device::ExactCall call = {};
  call.counts = counts.typed_data();
  call.placement = slots.flat().data();
  call.quota = amounts.flat().data();
  call.status = status->typed_data();
  call.all_ranks = static_cast<int>(ranks);
  call.all_experts = static_cast<int>(experts);
  call.all_slots = static_cast<int>(slots.columns());
  call.eps = eps;
  call.fan_out = static_cast<int32_t>(std::min<int64_t>(max_fan_out, std::numeric_limits<int32_t>::max()));
  call.localize = localize;
  if (!device::Fit(&call, domain, device::kSharedBytes)) {
    return xf::Error::InvalidArgument("moe_lb_plan_exact_kernel: the domain does not fit into shared memory");
  }
  return ToError(device::Launch(call, stream), "moe_lb_plan_exact_kernel");
}

// Only launches on the stream, so a CUDA graph may record it.
XLA_FFI_DEFINE_HANDLER(kExact, Exact, ExactBinding().Ctx<xf::PlatformStream<cudaStream_t>>(),
                       {xf::Traits::kCmdBufferCompatible});

}  // namespace

Registrations PlanningKernelRegistrations() { return {{}, {{"moe_lb_plan_exact_kernel", kExact}}}; }

bool ExactKernelFits(int64_t ranks, int64_t experts, int64_t slots, int64_t domain, double eps, bool localize) {
  device::ExactCall call = {};
  if (experts * slots * ranks > std::numeric_limits<int32_t>::max()) return false;
  call.all_ranks = static_cast<int>(ranks);
  call.all_experts = static_cast<int>(experts);
  call.all_slots = static_cast<int>(slots);
  call.eps = eps;
  call.localize = localize;
  return device::Fit(&call, domain, device::kSharedBytes);
}

}  // namespace moe_lb
