// Arguments of the planner `exact` in a block of a GPU, and its shared memory.
#pragma once

#include "ffi/planning/device/flow.h"
#include "ffi/planning/device/localize.h"
#include "ffi/planning/device/search.h"
#include "ffi/planning/device/thin.h"

namespace moe_lb::device {

// One call. All arrays are in global memory.
struct ExactCall {
  const int32_t* counts;  // [all ranks, all experts]
  int32_t* placement;     // [all ranks, all slots]
  int32_t* quota;         // [all experts, all ranks]
  int32_t* status;        // [1]: 0, or 1 for counts that ExactDomains refuses
  int all_ranks, all_experts, all_slots;
  Shape shape;  // of a domain
  double eps;
  int32_t fan_out;
  bool localize;
  bool keeps_counts;  // in shared memory, for `localize`
};

constexpr int kMaxRanks = 64;  // of a domain
constexpr int kCandidates = 6;

MOE_LB_ANYWHERE size_t WordsOf(const Shape& shape) {
  return static_cast<size_t>((shape.num_ranks + kLanes - 1) / kLanes);
}

// Offsets in bytes of the arrays of a block.
struct ExactLayout {
  size_t sums, results, tokens, load, hottest, flows, flow, thin, one_thin, search, replicas, counts, end;
};

MOE_LB_ANYWHERE ExactLayout LayOut(const ExactCall& call) {
  const Shape& shape = call.shape;
  ExactLayout at;
  size_t end = 0;
  const auto take = [&end](size_t bytes) {
    const size_t start = end;
    end += (bytes + 7) / 8 * 8;
    return start;
  };
  const size_t candidates = call.eps > 0 ? kCandidates : kCandidates / 2;
  at.sums = take(8 * kWarps);
  at.results = take(4 * (3 * kCandidates + 3));
  at.tokens = take(4 * static_cast<size_t>(shape.num_experts));
  at.load = take(4 * static_cast<size_t>(shape.num_ranks));
  at.hottest = take(2 * static_cast<size_t>(shape.num_ranks));
  at.flow = FlowBytes(shape, WordsOf(shape));
  at.flows = take(at.flow * candidates);
  // The best of the first half and each of the second half are thinned.
  at.one_thin = ThinBytes(shape);
  at.thin = take(at.one_thin * (candidates - 2));
  at.search = take(SearchBytes(shape, WordsOf(shape)));
  at.replicas = take(ReplicasBytes(shape));
  at.counts = take(call.keeps_counts ? 4 * static_cast<size_t>(shape.num_ranks * shape.num_experts) : 0);
  at.end = end;
  return at;
}

// Sets how a domain is planned: its shape, and whether its counts fit into shared memory, too. False: it does not fit.
inline bool Fit(ExactCall* call, int64_t domain, size_t shared_bytes) {
  if (domain > kMaxRanks) return false;
  const auto ranks = static_cast<int>(domain);
  const int home = call->all_experts / call->all_ranks;
  // A rank needs at most as many slots as the domain has experts.
  call->shape = {ranks, ranks * home, home, Least(call->all_slots - home, (ranks - 1) * home)};
  // Amounts, slots and experts have 16 bits.
  if (call->shape.num_experts + call->shape.all_slots() > 0xffff) return false;
  call->keeps_counts = call->localize;
  if (call->keeps_counts && LayOut(*call).end > shared_bytes) call->keeps_counts = false;
  return LayOut(*call).end <= shared_bytes;
}

}  // namespace moe_lb::device
