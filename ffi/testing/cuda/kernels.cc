// Kernels of planners on the stand-in: the planner of CPUs, run by the thread of the stream.
#include "ffi/planning/device/launch.h"
#include "ffi/planning/exact_domains.h"
#include "ffi/testing/cuda/stand_in.h"

namespace moe_lb::device {

cudaError_t Launch(const ExactCall& call, cudaStream_t stream) {
  testing::Launch(stream, [call] {
    const auto ranks = static_cast<size_t>(call.all_ranks), experts = static_cast<size_t>(call.all_experts);
    const ExactDomainsOptions options = {call.eps, call.fan_out, call.localize};
    const Status bad =
        ExactDomains({call.counts, ranks, experts}, call.shape.num_ranks, options,
                     {call.placement, ranks, static_cast<size_t>(call.all_slots)}, {call.quota, experts, ranks});
    call.status[0] = bad ? 1 : 0;
  });
  return cudaSuccess;
}

}  // namespace moe_lb::device
