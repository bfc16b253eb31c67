// Removes replicas within a limit.
#pragma once

#include <cstdint>
#include <vector>

#include "ffi/planning/serving.h"

namespace moe_lb {

// Removes replicas, the one with the fewest tokens first, ties to the one added first, as long as every rank can stay
// within the limit. Removing any further replica would exceed the limit.
class Thinning {
 public:
  void Thin(Serving& serving, int32_t limit);

 private:
  bool MayGo(const Serving& serving, uint32_t entry);
  void FindComponents(const Serving& serving, int32_t limit);
  uint32_t Group(uint32_t rank);

  std::vector<uint64_t> order_;  // tokens above the entry, in one number
  std::vector<uint32_t> group_;  // [R], union-find
  std::vector<int64_t> room_;    // [R], below the limit, of the groups' heads
  Serving::Amounts saved_;
};

}  // namespace moe_lb
