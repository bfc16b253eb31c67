#include "ffi/planning/device/exact_on_fibers.h"

#include <algorithm>

#include "ffi/planning/device/exact.h"
#include "ffi/planning/device/fibers.h"

namespace moe_lb::device {

Status ExactOnFibers(MatrixView<const int32_t> counts, int64_t domain, const ExactDomainsOptions& options,
                     size_t shared_bytes, MatrixView<int32_t> placement, MatrixView<int32_t> quota, BlockTime* time) {
  // Checks the arguments, and fills the results with a plan that is overwritten.
  if (Status bad = ExactDomains(counts, domain, options, placement, quota)) return bad;
  int32_t status = 0;
  ExactCall call = {};
  call.counts = counts.flat().data();
  call.placement = placement.flat().data();
  call.quota = quota.flat().data();
  call.status = &status;
  call.all_ranks = static_cast<int>(counts.rows());
  call.all_experts = static_cast<int>(counts.columns());
  call.all_slots = static_cast<int>(placement.columns());
  call.eps = options.eps;
  call.fan_out = static_cast<int32_t>(std::min<int64_t>(options.max_fan_out, INT32_MAX));
  call.localize = options.localize;
  if (!Fit(&call, domain, shared_bytes)) {
    return Refuse("domain is ", domain, " ranks; expected one that fits into the shared memory of a block");
  }
  Fibers block(LayOut(call).end);
  for (int number = 0; number < call.all_ranks / call.shape.num_ranks; ++number) {
    block.Run([&](const FiberThreads& t) {
      if (WordsOf(call.shape) == 1) {
        ExactPlanner<FiberThreads, 1>::Run(t, call, number);
      } else {
        ExactPlanner<FiberThreads, 2>::Run(t, call, number);
      }
    });
    if (!block.faults().empty()) return Refuse("the block fails: ", block.faults()[0]);
    if (block.time().cycles > time->cycles) *time = block.time();
  }
  return Ok();
}

}  // namespace moe_lb::device
