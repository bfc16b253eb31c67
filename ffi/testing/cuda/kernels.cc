// Kernels of planners on the stand-in: the planners of CPUs, run by the thread of the stream.
#include "ffi/planning/device/launch.h"
#include "ffi/planning/ultraep.h"
#include "ffi/testing/cuda/calls.h"
#include "ffi/testing/cuda/stand_in.h"

namespace moe_lb::device {
cudaError_t Launch(const ExactCall& call, cudaStream_t stream) {
  if (const cudaError_t bad = testing::Enter("cudaLaunchKernel"); bad != cudaSuccess) return bad;
  testing::Launch(stream, [call] {
    const size_t ranks = Size(call.all_ranks), experts = Size(call.all_experts);
    const ExactDomainsOptions options = {call.shape.num_ranks, call.eps, call.fan_out, call.localize};
    const Status bad = ExactDomains({call.counts, ranks, experts}, options,
                                    {call.placement, ranks, Size(call.all_slots)}, {call.quota, experts, ranks});
    call.status[0] = bad ? 1 : 0;
  });
  return cudaSuccess;
}

cudaError_t Launch(const UltraEpCall& call, cudaStream_t stream) {
  if (const cudaError_t bad = testing::Enter("cudaLaunchKernel"); bad != cudaSuccess) return bad;
  testing::Launch(stream, [call] {
    const EditCall& plan = call.plan;
    const size_t ranks = Size(plan.all_ranks), experts = Size(plan.all_experts), slots = Size(plan.slots);
    const Status bad = UltraEp({plan.placement, ranks, slots}, {plan.quota, experts, ranks}, call.options,
                               {plan.new_placement, ranks, slots}, {plan.new_quota, experts, ranks});
    plan.status[0] = bad ? 1 : 0;
  });
  return cudaSuccess;
}

cudaError_t Launch(const RelayCall& call, cudaStream_t stream) {
  if (const cudaError_t bad = testing::Enter("cudaLaunchKernel"); bad != cudaSuccess) return bad;
  testing::Launch(stream, [call] {
    const Status bad = Relay({call.placement, Size(call.num_ranks), Size(call.slots)}, call.options,
                             {call.relay, Size(call.num_ranks), Size(call.slots)});
    call.status[0] = bad ? 1 : 0;
  });
  return cudaSuccess;
}

}  // namespace moe_lb::device
