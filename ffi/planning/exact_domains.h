// `Exact` on all domains of a plan.
#pragma once

#include <cstdint>
#include <limits>

#include "ffi/common/fields.h"
#include "ffi/common/status.h"
#include "ffi/common/view.h"

namespace moe_lb {

struct ExactDomainsOptions {
  // Ranks of a domain; divides R. The experts of its ranks are served inside it, wherever their tokens start.
  int64_t domain = 0;
  // As in ExactOptions.
  double eps = 0.01;
  int64_t max_fan_out = std::numeric_limits<int64_t>::max();
  // If true, exchange replicas to serve more tokens on the rank where they start.
  bool localize = true;
  // As in ExactOptions.
  bool brief = false;

  static auto Fields() {
    return std::make_tuple(Named("domain", &ExactDomainsOptions::domain), Named("eps", &ExactDomainsOptions::eps),
                           Named("max_fan_out", &ExactDomainsOptions::max_fan_out),
                           Named("localize", &ExactDomainsOptions::localize),
                           Named("brief", &ExactDomainsOptions::brief));
  }
};

Status CheckOptions(const ExactDomainsOptions& options);

// Plans every domain separately, starting without replicas: see exact.h.
//
//   counts: [R, E], tokens of each expert starting on each rank, at least 0; their sum must fit int32. E is
//     a positive multiple of R. Home of expert e is rank e / (E / R).
//   placement: [R, S], S >= E / R. Each rank's home experts, then its replicas, then -1.
//   quota: [E, R].
Status ExactDomains(MatrixView<const int32_t> counts, const ExactDomainsOptions& options, MatrixView<int32_t> placement,
                    MatrixView<int32_t> quota);

}  // namespace moe_lb
