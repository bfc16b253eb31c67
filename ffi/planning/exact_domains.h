// `Exact` on all domains of a plan.
#pragma once

#include <cstdint>

#include "ffi/common/status.h"
#include "ffi/common/view.h"

namespace moe_lb {

struct ExactDomainsOptions {
  // As in ExactOptions.
  double eps = 0;
  int64_t max_fan_out = 0;
  // If true, exchange replicas to serve more tokens on the rank where they start.
  bool localize = false;
};

// Plans every domain separately, starting without replicas: see exact.h.
//
//   counts: [R, E], tokens of each expert starting on each rank, at least 0; their sum must fit int32. E is
//     a positive multiple of R. Home of expert e is rank e / (E / R).
//   domain: ranks of a domain; divides R. The experts of its ranks are served inside it, wherever
//     their tokens start.
//   placement: [R, S], S >= E / R. Each rank's home experts, then its replicas, then -1.
//   quota: [E, R].
Status ExactDomains(MatrixView<const int32_t> counts, int64_t domain, const ExactDomainsOptions& options,
                    MatrixView<int32_t> placement, MatrixView<int32_t> quota);

}  // namespace moe_lb
