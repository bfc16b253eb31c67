#include "ffi/planning/device/on_fibers.h"

#include "ffi/planning/device/exact.h"
#include "ffi/planning/device/relay.h"
#include "ffi/planning/device/run_on_fibers.h"
#include "ffi/planning/device/ultraep.h"
#include "ffi/planning/ultraep.h"

namespace moe_lb::device {
namespace {

Status TooLarge(const char* what, int64_t ranks) {
  return Refuse(what, " is ", ranks, " ranks; expected one that fits into the shared memory of a block");
}

template <template <typename, int> class Planner, typename Call>
Status Run(const Call& call, BlockTime* time) {
  Fibers fibers(LayOut(call).end);
  RunOnFibers<Planner>(fibers, call, time);
  return fibers.faults().empty() ? Ok() : Refuse("the block fails: ", fibers.faults()[0]);
}

}  // namespace

// The planner of the CPU checks the arguments, and fills the results with a plan that is overwritten.

Status ExactOnFibers(MatrixView<const int32_t> counts, const ExactDomainsOptions& options,
                     MatrixView<int32_t> placement, MatrixView<int32_t> quota, BlockTime* time) {
  if (Status bad = ExactDomains(counts, options, placement, quota)) return bad;
  int32_t status = 0;
  const int32_t limit = INT32_MAX;
  ExactCall call = ExactOf(counts, {&limit, 1}, options, placement, quota, &status);
  if (!Fit(&call, options.domain)) return TooLarge("domain", options.domain);
  return Run<ExactPlanner>(call, time);
}

Status UltraEpOnFibers(MatrixView<const int32_t> placement, MatrixView<const int32_t> quota,
                       const UltraEpOptions& options, MatrixView<int32_t> new_placement, MatrixView<int32_t> new_quota,
                       BlockTime* time) {
  if (Status bad = UltraEp(placement, quota, options, new_placement, new_quota)) return bad;
  int32_t status = 0;
  const EditCall plan = EditOf(placement, quota, options.domain, new_placement, new_quota, &status);
  const UltraEpCall call = {plan, options};
  if (!Fit(call)) return TooLarge("domain", options.domain);
  return Run<UltraEpPlanner>(call, time);
}

Status RelayOnFibers(MatrixView<const int32_t> placement, const RelayOptions& options, MatrixView<int32_t> relay,
                     BlockTime* time) {
  if (Status bad = Relay(placement, options, relay)) return bad;
  int32_t status = 0;
  const RelayCall call = RelayOf(placement, options, relay, &status);
  if (!Fit(call)) return TooLarge("placement", call.num_ranks);
  return Run<RelayPlanner>(call, time);
}

}  // namespace moe_lb::device
