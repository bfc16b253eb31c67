#include "ffi/planning/varied_chain.h"

#include <algorithm>

namespace moe_lb {
namespace {

constexpr uint32_t kNoRank = UINT32_MAX;

// Returns the lowest index of the largest key, or kNoRank if all are 0. Two passes, because compilers vectorize the
// maximum without its index.
uint32_t FirstOfMost(const std::vector<uint32_t>& keys) {
  uint32_t most = 0;
  for (const uint32_t key : keys) most = most > key ? most : key;
  if (most == 0) return kNoRank;
  return static_cast<uint32_t>(std::find(keys.begin(), keys.end(), most) - keys.begin());
}

}  // namespace

VariedChain::VariedChain(size_t num_ranks, size_t slots, size_t fan_out)
    : slots_(slots),
      fan_out_(fan_out),
      used_(num_ranks),
      sent_(num_ranks),
      goal_(num_ranks),
      hottest_(num_ranks),
      room_(num_ranks),
      donates_(num_ranks),
      welcome_(num_ranks) {}

void VariedChain::Fill(Serving& serving, int32_t limit, const Variation& variation) {
  serving.Reset();
  Start(serving, limit, variation);
  uint32_t receiver = kNoRank;
  for (;;) {
    if (!variation.Stays() || receiver == kNoRank || room_[receiver] == 0) receiver = FirstOfMost(room_);
    const uint32_t donor = FirstOfMost(donates_);
    if (receiver == kNoRank || donor == kNoRank) return;
    // As in Chain, the piece closes the receiver or takes the whole expert.
    const uint32_t expert = hottest_[donor];
    serving.Add(expert, receiver, std::min(serving.tokens(expert), limit - serving.load(receiver)));
    ++used_[receiver];
    ++sent_[donor];
    Update(serving, receiver, limit, variation);
    Update(serving, donor, limit, variation);
  }
}

void VariedChain::Start(const Serving& serving, int32_t limit, const Variation& variation) {
  std::fill(used_.begin(), used_.end(), 0);
  std::fill(sent_.begin(), sent_.end(), 0);
  liking_.resize(serving.num_experts());
  for (uint32_t expert = 0; expert < liking_.size(); ++expert) liking_[expert] = variation.Liking(expert);
  for (uint32_t rank = 0; rank < serving.num_ranks(); ++rank) {
    welcome_[rank] = variation.Welcome(rank);
    goal_[rank] = variation.Goal(rank, limit);
    Update(serving, rank, limit, variation);
  }
}

void VariedChain::Update(const Serving& serving, uint32_t rank, int32_t limit, const Variation& variation) {
  const int32_t load = serving.load(rank);
  if (load <= goal_[rank]) goal_[rank] = limit;
  const bool gives = load > goal_[rank];
  const bool receives = !gives && used_[rank] < slots_;
  room_[rank] = receives ? Variation::Weighted(limit - load, welcome_[rank]) : 0;
  donates_[rank] = 0;
  if (!gives || sent_[rank] == fan_out_) return;
  uint32_t most = 0;
  const auto first = static_cast<uint32_t>(rank * serving.home_experts());
  for (uint32_t expert = first; expert < first + serving.home_experts(); ++expert) {
    const uint32_t key = Variation::Weighted(serving.tokens(expert), liking_[expert]);
    if (key <= most) continue;
    most = key;
    hottest_[rank] = expert;
  }
  // A donor only has tokens of its home experts, so some expert has tokens.
  donates_[rank] = variation.DonorKey(most, load, limit);
}

}  // namespace moe_lb
