#include "ffi/planning/thinning.h"

#include <algorithm>
#include <numeric>

namespace moe_lb {

void Thinning::Thin(Serving& serving, int32_t limit) {
  order_.clear();
  for (auto entry = static_cast<uint32_t>(serving.num_experts()); entry < serving.num_entries(); ++entry) {
    order_.push_back(entry);
  }
  // Sort by the tokens before any removal. They change with every removal, but a fixed order needs one sort, and every
  // replica is still tried once.
  std::stable_sort(order_.begin(), order_.end(),
                   [&](uint32_t a, uint32_t b) { return serving.tokens(a) < serving.tokens(b); });
  int64_t slack = 0;
  for (uint32_t rank = 0; rank < serving.num_ranks(); ++rank) slack += limit - serving.load(rank);
  FindCycles(serving);
  serving.Save(&saved_);
  for (const uint32_t entry : order_) {
    if (!MayGo(serving, entry, slack)) continue;
    serving.Remove(entry);
    // A removal adds load to home alone, so only home must be offloaded.
    if (serving.OffloadRank(serving.rank(serving.expert(entry)), limit)) {
      serving.Save(&saved_);
    } else {
      // OffloadRank may have moved tokens before it failed, so all amounts are restored.
      serving.Restore(saved_, entry);
    }
  }
}

// A necessary condition. In a tree of replicas, loads determine the tokens of each replica up to the slack, so a
// replica with more can be removed only if there is a cycle. Cycles found at the start suffice, because removals create
// none.
bool Thinning::MayGo(const Serving& serving, uint32_t entry, int64_t slack) {
  return serving.tokens(entry) <= slack || has_cycle_[Group(serving.rank(entry))] != 0;
}

void Thinning::FindCycles(const Serving& serving) {
  group_.resize(serving.num_ranks());
  std::iota(group_.begin(), group_.end(), 0);
  has_cycle_.assign(serving.num_ranks(), 0);
  for (auto entry = static_cast<uint32_t>(serving.num_experts()); entry < serving.num_entries(); ++entry) {
    if (serving.removed(entry)) continue;
    const uint32_t a = Group(serving.rank(entry));
    const uint32_t b = Group(serving.rank(serving.expert(entry)));
    if (a != b) group_[a] = b;
    has_cycle_[b] |= static_cast<uint8_t>(a == b || has_cycle_[a] != 0);
  }
}

uint32_t Thinning::Group(uint32_t rank) {
  while (group_[rank] != rank) rank = group_[rank] = group_[group_[rank]];
  return rank;
}

}  // namespace moe_lb
