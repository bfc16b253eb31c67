#include "ffi/planning/device/exact.h"
#include "ffi/planning/device/launch.h"
#include "ffi/planning/device/relay.h"
#include "ffi/planning/device/ultraep.h"

namespace moe_lb::device {
namespace {

template <template <typename, int> class Planner, int W, typename Call>
__global__ void __launch_bounds__(kThreads, 1) PlanKernel(const Call call) {
  extern __shared__ __align__(16) char shared[];
  const CudaThreads t(shared);
  Planner<CudaThreads, W>::Run(t, call, static_cast<int>(blockIdx.x));
}

template <template <typename, int> class Planner, typename Call>
cudaError_t LaunchPlanner(const Call& call, cudaStream_t stream) {
  static_assert(kMaxRanks == 4 * kLanes);
  const auto kernel = call.words() == 1   ? PlanKernel<Planner, 1, Call>
                      : call.words() == 2 ? PlanKernel<Planner, 2, Call>
                                          : PlanKernel<Planner, 4, Call>;
  const size_t shared_bytes = LayOut(call).end;
  // Above 48 KB the size must be allowed, on each device.
  const cudaError_t allowed =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  if (allowed != cudaSuccess) return allowed;
  // Not cudaGetLastError, which may return an error of this thread that an earlier call has handled.
  void* arguments[] = {const_cast<Call*>(&call)};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(call.blocks())),
                          dim3(kThreads), arguments, shared_bytes, stream);
}

}  // namespace

cudaError_t Launch(const ExactCall& call, cudaStream_t stream) { return LaunchPlanner<ExactPlanner>(call, stream); }
cudaError_t Launch(const UltraEpCall& call, cudaStream_t stream) { return LaunchPlanner<UltraEpPlanner>(call, stream); }
cudaError_t Launch(const RelayCall& call, cudaStream_t stream) { return LaunchPlanner<RelayPlanner>(call, stream); }

}  // namespace moe_lb::device
