// Kernels of planners on the stand-in: the planners of CPUs, run by the thread of the stream.
#include <algorithm>
#include <vector>

#include "ffi/planning/device/launch.h"
#include "ffi/planning/ultraep.h"
#include "ffi/testing/cuda/calls.h"
#include "ffi/testing/cuda/stand_in.h"

namespace moe_lb::device {
cudaError_t Launch(const ExactCall& call, cudaStream_t stream) {
  if (const cudaError_t bad = testing::Enter("cudaLaunchKernel"); bad != cudaSuccess) return bad;
  testing::Launch(stream, [call] {
    const size_t ranks = Size(call.all_ranks), experts = Size(call.all_experts), all_slots = Size(call.all_slots);
    for (int plan = 0; plan < call.plans; ++plan) {
      const ExactCall one = call.Only(plan, call.limits[plan]);
      const ExactDomainsOptions options = {one.shape.num_ranks, one.eps, one.fan_out, one.localize};
      const size_t slots = Size(one.shape.home + one.shape.slots);
      std::vector<int32_t> placement(ranks * slots);
      const Status bad = ExactDomains({one.counts, ranks, experts}, options, {placement.data(), ranks, slots},
                                      {one.quota, experts, ranks});
      one.status[0] = bad ? 1 : 0;
      // The slots above the limit are empty.
      std::fill_n(one.placement, ranks * all_slots, -1);
      for (size_t rank = 0; rank < ranks; ++rank) {
        std::copy_n(placement.data() + rank * slots, slots, one.placement + rank * all_slots);
      }
    }
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
