#include "ffi/testing/random_placement.h"

#include <vector>

namespace moe_lb::testing {

Placement::Placement(Random& random)
    : domain(random.Between(1, 4)),
      ranks(domain * random.Between(1, 3)),
      home(random.Between(1, 3)),
      slots(home + random.Below(4)),
      experts(ranks * home) {
  std::vector<int32_t> values;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    for (int64_t slot = 0; slot < slots; ++slot) {
      // Replicas may be of any expert, also of another domain or twice on a rank: planners must accept placements of
      // other planners.
      const int64_t replica = random.Chance(50) ? random.Below(experts) : -1;
      values.push_back(static_cast<int32_t>(slot < home ? rank * home + slot : replica));
    }
  }
  array = Ints({ranks, slots}, values);
}

GreedyOptions RandomGreedy(Random& random, const Placement& placement) {
  return {placement.domain, random.Between(1, 10)};
}

FeplbOptions RandomFeplb(Random& random, const Placement& placement) {
  return {placement.domain, random.Between(1, 3), random.Between(1, 3), random.Between(1, 10), random.Chance(50)};
}

}  // namespace moe_lb::testing
