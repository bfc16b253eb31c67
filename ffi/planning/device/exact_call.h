// Arguments of the planner `exact` in a block of a GPU, and its shared memory.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ffi/common/view.h"
#include "ffi/planning/device/flow.h"
#include "ffi/planning/device/localize.h"
#include "ffi/planning/device/search.h"
#include "ffi/planning/device/thin.h"
#include "ffi/planning/exact_domains.h"

namespace moe_lb::device {

// One call: a plan for each limit on the replicas that a rank receives, and its experts send. All arrays are in global
// memory.
struct ExactCall {
  const int32_t* counts;  // [all ranks, all experts]
  const int32_t* limits;  // [plans]
  int32_t* placement;     // [plans, all ranks, all slots]
  int32_t* quota;         // [plans, all experts, all ranks]
  int32_t* status;        // [1]: 0, or 1 for counts that ExactDomains refuses
  int plans;
  int all_ranks, all_experts, all_slots;
  Shape shape;  // of a domain
  double eps;
  int32_t fan_out;
  bool localize;
  bool brief;         // of the plan
  bool keeps_counts;  // in shared memory, for `localize`

  MOE_LB_ANYWHERE int domains() const { return all_ranks / shape.num_ranks; }
  MOE_LB_ANYWHERE int blocks() const { return plans * domains(); }
  MOE_LB_ANYWHERE size_t all_amounts() const { return Size(all_experts) * Size(all_ranks); }
  MOE_LB_ANYWHERE size_t words() const { return shape.words(); }

  // The call of one of the plans. Its shared memory is not more than that of the whole call.
  MOE_LB_ANYWHERE ExactCall Only(int plan, int32_t limit) const {
    ExactCall one = *this;
    one.placement += Size(plan) * Size(all_ranks * all_slots);
    one.quota += Size(plan) * all_amounts();
    one.plans = 1;
    one.shape.slots = Least(shape.slots, Most(limit, 0));
    one.fan_out = Least(fan_out, Most(limit, 0));
    one.brief = brief || limit < Least(fan_out, shape.all_slots());
    return one;
  }
};

constexpr int kCandidates = 6;

// Offsets in bytes of the arrays of a block.
struct ExactLayout {
  size_t sums, results, tokens, load, hottest, flows, flow, thin, one_thin, search, replicas, counts, end;
};

MOE_LB_ANYWHERE ExactLayout LayOut(const ExactCall& call) {
  const Shape& shape = call.shape;
  ExactLayout at;
  Offsets offsets;
  const size_t candidates = call.eps > 0 ? kCandidates : kCandidates / 2;
  at.sums = offsets.Take(8 * kWarps);
  at.results = offsets.Take(4 * (4 * kCandidates + 2));
  at.tokens = offsets.Take(4 * static_cast<size_t>(shape.num_experts));
  at.load = offsets.Take(4 * static_cast<size_t>(shape.num_ranks));
  at.hottest = offsets.Take(2 * static_cast<size_t>(shape.num_ranks));
  at.flow = FlowBytes(shape, shape.words());
  // The best, and three further candidates for a lower maximum.
  at.flows = offsets.Take(at.flow * Most<size_t>(candidates, kCandidates / 2 + 1));
  // The best of the first half and each of the second half are thinned.
  at.one_thin = ThinBytes(shape);
  at.thin = offsets.Take(at.one_thin * (candidates - 2));
  at.search = offsets.Take(SearchBytes(shape, shape.words()));
  at.replicas = offsets.Take(ReplicasBytes(shape));
  at.counts = offsets.Take(call.keeps_counts ? 4 * static_cast<size_t>(shape.num_ranks * shape.num_experts) : 0);
  at.end = offsets.end;
  return at;
}

// Sets how a domain is planned: its shape, and whether its counts fit into shared memory, too. False: it does not fit.
inline bool Fit(ExactCall* call, int64_t domain) {
  if (domain > kMaxRanks || !HasSmallOffsets(call->all_ranks, call->all_experts, call->all_slots)) return false;
  const auto ranks = static_cast<int>(domain);
  const int home = call->all_experts / call->all_ranks;
  // A rank needs at most as many slots as the domain has experts.
  call->shape = {ranks, ranks * home, home, Least(call->all_slots - home, (ranks - 1) * home)};
  // Amounts, slots and experts have 16 bits.
  if (call->shape.num_experts + call->shape.all_slots() > 0xffff) return false;
  call->keeps_counts = call->localize;
  if (call->keeps_counts && LayOut(*call).end > kSharedBytes) call->keeps_counts = false;
  return LayOut(*call).end <= kSharedBytes;
}

// A call of arrays whose shapes match; `Fit` sets the rest.
inline ExactCall ExactOf(MatrixView<const int32_t> counts, View<const int32_t> limits,
                         const ExactDomainsOptions& options, MatrixView<int32_t> placement, MatrixView<int32_t> quota,
                         int32_t* status) {
  ExactCall call = {};
  call.counts = counts.flat().data();
  call.limits = limits.data();
  call.plans = static_cast<int>(limits.size());
  call.placement = placement.flat().data();
  call.quota = quota.flat().data();
  call.status = status;
  call.all_ranks = static_cast<int>(counts.rows());
  call.all_experts = static_cast<int>(counts.columns());
  call.all_slots = static_cast<int>(placement.columns());
  call.eps = options.eps;
  call.fan_out = static_cast<int32_t>(std::min<int64_t>(options.max_fan_out, INT32_MAX));
  call.localize = options.localize;
  call.brief = options.brief;
  return call;
}

}  // namespace moe_lb::device
