// Arguments shared by the calls of planners and of planners with copies.
#pragma once

#include <cstdint>

#include "ffi/planning/feplb.h"
#include "ffi/planning/greedy.h"
#include "ffi/testing/random_calls.h"

namespace moe_lb::testing {

// A placement [R, S]: each rank's home experts first, then replicas or empty slots; and the sizes of the planner's
// other arguments.
struct Placement {
  explicit Placement(Random& random);

  int64_t domain;
  int64_t ranks;
  int64_t home;
  int64_t slots;
  int64_t experts;
  Array array;
};

GreedyOptions RandomGreedy(Random& random, const Placement& placement);
FeplbOptions RandomFeplb(Random& random, const Placement& placement);

}  // namespace moe_lb::testing
