// Arguments that the planners' own calls and those that plan and copy have in common.
#pragma once

#include <cstdint>

#include "ffi/testing/random_calls.h"

namespace moe_lb::testing {

// A placement [R, S] with the experts at home in the first slots of their rank, then replicas or nothing, and the sizes
// that the other arguments of a planner must fit.
struct Placement {
  explicit Placement(Random& random);

  int64_t domain;
  int64_t ranks;
  int64_t home;
  int64_t slots;
  int64_t experts;
  Array array;
};

// The attributes of FEPLB, but for the domain, which must fit a placement.
void AddFeplbOptions(Random& random, Attributes* attributes);

}  // namespace moe_lb::testing
