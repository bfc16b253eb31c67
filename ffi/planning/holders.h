// Lists of the slots holding each expert.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ffi/common/view.h"

namespace moe_lb {

// One linked list of slots per expert. A slot is numbered rank * S + its place on the rank.
class Holders {
 public:
  // placement: [R, S], experts below num_experts, or -1 for an empty slot.
  Holders(MatrixView<const int32_t> placement, size_t num_experts)
      : first_(num_experts, kEnd), next_(placement.rows() * placement.columns(), kEnd) {
    const View<const int32_t> experts = placement.flat();
    // Insert from the last slot to the first, so that a list starts with the lowest.
    for (size_t slot = experts.size(); slot-- > 0;) {
      if (experts[slot] >= 0) Add(static_cast<size_t>(experts[slot]), slot);
    }
  }

  // Adds an expert to an empty slot; the slot becomes the front of the expert's list.
  void Add(size_t expert, size_t slot) {
    next_[slot] = first_[expert];
    first_[expert] = slot;
  }

  // for (size_t slot = holders.First(expert); slot != Holders::kEnd; slot = holders.Next(slot))
  static constexpr size_t kEnd = SIZE_MAX;
  size_t First(size_t expert) const { return first_[expert]; }
  size_t Next(size_t slot) const { return next_[slot]; }

 private:
  std::vector<size_t> first_;
  std::vector<size_t> next_;
};

}  // namespace moe_lb
