#include "ffi/planning/thinning.h"

#include <algorithm>
#include <numeric>

namespace moe_lb {
namespace {

constexpr int64_t kUnbounded = int64_t{1} << 61;

}  // namespace

void Thinning::Thin(Serving& serving, int32_t limit) {
  order_.clear();
  for (auto entry = static_cast<uint32_t>(serving.num_experts()); entry < serving.num_entries(); ++entry) {
    order_.push_back(static_cast<uint64_t>(serving.tokens(entry)) << 32 | entry);
  }
  // Sort by the tokens before any removal. They change with every removal, but a fixed order needs one sort, and every
  // replica is still tried once.
  std::sort(order_.begin(), order_.end());
  FindComponents(serving, limit);
  serving.Save(&saved_);
  bool has_parted = false;
  for (const uint64_t key : order_) {
    const auto entry = static_cast<uint32_t>(key);
    if (!MayGo(serving, entry)) continue;
    serving.Remove(entry);
    // A removal adds load to home alone, so only home must be offloaded.
    if (serving.OffloadRank(serving.rank(serving.expert(entry)), limit)) {
      serving.Save(&saved_);
      // The component may have fallen apart, and its parts have less room. The earlier room still excludes no removal
      // that is possible, and most removals in a row succeed, so the components are found after the next failure.
      has_parted = true;
      continue;
    }
    // OffloadRank may have moved tokens before it failed, so all amounts are restored.
    serving.Restore(saved_, entry);
    if (has_parted) FindComponents(serving, limit);
    has_parted = false;
  }
}

// A necessary condition, which most replicas fail. In a tree of replicas, a removal separates the replica's rank from
// the home of its expert. The ranks left beside home then serve its tokens, within their room. Their room is at most
// the one of the component, since no rank is above the limit. Only with a cycle may tokens take another path: its room
// is unbounded.
bool Thinning::MayGo(const Serving& serving, uint32_t entry) {
  return serving.tokens(entry) <= room_[Group(serving.rank(entry))];
}

void Thinning::FindComponents(const Serving& serving, int32_t limit) {
  group_.resize(serving.num_ranks());
  std::iota(group_.begin(), group_.end(), 0);
  room_.assign(serving.num_ranks(), 0);
  for (auto entry = static_cast<uint32_t>(serving.num_experts()); entry < serving.num_entries(); ++entry) {
    if (serving.removed(entry)) continue;
    const uint32_t a = Group(serving.rank(entry));
    const uint32_t b = Group(serving.rank(serving.expert(entry)));
    if (a != b) group_[a] = b;
    room_[b] = a == b ? kUnbounded : std::max(room_[a], room_[b]);
  }
  for (uint32_t rank = 0; rank < serving.num_ranks(); ++rank) room_[Group(rank)] += limit - serving.load(rank);
}

uint32_t Thinning::Group(uint32_t rank) {
  while (group_[rank] != rank) rank = group_[rank] = group_[group_[rank]];
  return rank;
}

}  // namespace moe_lb
