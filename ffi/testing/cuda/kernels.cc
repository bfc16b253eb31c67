// Kernels of planners on the stand-in: the planners of CPUs, run by the thread of the stream.
#include "ffi/planning/device/launch.h"
#include "ffi/planning/greedy.h"
#include "ffi/planning/ultraep.h"
#include "ffi/testing/cuda/calls.h"
#include "ffi/testing/cuda/stand_in.h"

namespace moe_lb::device {
namespace {

// Runs `plan(placement, quota, new placement, new quota)` on the arrays of a call.
template <typename Plan>
cudaError_t LaunchEdit(const EditCall& call, cudaStream_t stream, const Plan& plan) {
  if (const cudaError_t bad = testing::Enter("cudaLaunchKernel"); bad != cudaSuccess) return bad;
  testing::Launch(stream, [call, plan] {
    const size_t ranks = Size(call.all_ranks), experts = Size(call.all_experts), slots = Size(call.slots);
    const Status bad = plan(
        MatrixView<const int32_t>(call.placement, ranks, slots), MatrixView<const int32_t>(call.quota, experts, ranks),
        MatrixView<int32_t>(call.new_placement, ranks, slots), MatrixView<int32_t>(call.new_quota, experts, ranks));
    call.status[0] = bad ? 1 : 0;
  });
  return cudaSuccess;
}

}  // namespace

cudaError_t Launch(const ExactCall& call, cudaStream_t stream) {
  if (const cudaError_t bad = testing::Enter("cudaLaunchKernel"); bad != cudaSuccess) return bad;
  testing::Launch(stream, [call] {
    const size_t ranks = Size(call.all_ranks), experts = Size(call.all_experts);
    const ExactDomainsOptions options = {call.eps, call.fan_out, call.localize};
    const Status bad = ExactDomains({call.counts, ranks, experts}, call.shape.num_ranks, options,
                                    {call.placement, ranks, Size(call.all_slots)}, {call.quota, experts, ranks});
    call.status[0] = bad ? 1 : 0;
  });
  return cudaSuccess;
}

cudaError_t Launch(const GreedyCall& call, cudaStream_t stream) {
  return LaunchEdit(call.plan, stream, [call](auto placement, auto quota, auto new_placement, auto new_quota) {
    return Greedy(placement, quota, call.plan.num_ranks, call.min_tokens, new_placement, new_quota);
  });
}

cudaError_t Launch(const UltraEpCall& call, cudaStream_t stream) {
  return LaunchEdit(call.plan, stream, [call](auto placement, auto quota, auto new_placement, auto new_quota) {
    return UltraEp(placement, quota, call.plan.num_ranks, call.eps, call.min_tokens, new_placement, new_quota);
  });
}

cudaError_t Launch(const FeplbCall& call, cudaStream_t stream) {
  const FeplbOptions options = {call.plan.num_ranks, call.num_dynamic, call.max_num_dyn, call.tau, call.skip};
  return LaunchEdit(call.plan, stream, [options](auto placement, auto quota, auto new_placement, auto new_quota) {
    return Feplb(placement, quota, options, new_placement, new_quota);
  });
}

cudaError_t Launch(const RelayCall& call, cudaStream_t stream) {
  if (const cudaError_t bad = testing::Enter("cudaLaunchKernel"); bad != cudaSuccess) return bad;
  testing::Launch(stream, [call] {
    const RelayOptions options = {call.min_replicas, call.max_relays, call.min_gain};
    const Status bad = Relay({call.placement, Size(call.num_ranks), Size(call.slots)}, call.home, options,
                             {call.relay, Size(call.num_ranks), Size(call.slots)});
    call.status[0] = bad ? 1 : 0;
  });
  return cudaSuccess;
}

}  // namespace moe_lb::device
