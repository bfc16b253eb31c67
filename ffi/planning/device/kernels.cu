#include "ffi/planning/device/exact.h"
#include "ffi/planning/device/launch.h"

namespace moe_lb::device {
namespace {

template <int W>
__global__ void __launch_bounds__(kThreads, 1) ExactKernel(const ExactCall call) {
  extern __shared__ __align__(16) char shared[];
  const CudaThreads t(shared);
  ExactPlanner<CudaThreads, W>::Run(t, call, static_cast<int>(blockIdx.x));
}

template <typename Call>
cudaError_t LaunchKernel(void (*kernel)(Call), const Call& call, int blocks, size_t shared_bytes, cudaStream_t stream) {
  // Above 48 KB the size must be allowed, on each device.
  const cudaError_t allowed =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  if (allowed != cudaSuccess) return allowed;
  kernel<<<static_cast<unsigned>(blocks), kThreads, shared_bytes, stream>>>(call);
  return cudaGetLastError();
}

}  // namespace

cudaError_t Launch(const ExactCall& call, cudaStream_t stream) {
  const int blocks = call.all_ranks / call.shape.num_ranks;
  const auto kernel = WordsOf(call.shape) == 1 ? ExactKernel<1> : ExactKernel<2>;
  return LaunchKernel(kernel, call, blocks, LayOut(call).end, stream);
}

}  // namespace moe_lb::device
