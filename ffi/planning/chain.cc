#include "ffi/planning/chain.h"

#include <algorithm>

namespace moe_lb {
namespace {

uint32_t Hottest(const Serving& serving, uint32_t rank) {
  const auto first = static_cast<uint32_t>(rank * serving.home_experts());
  uint32_t best = first;
  for (uint32_t expert = first + 1; expert < first + serving.home_experts(); ++expert) {
    // Strictly more tokens are required, so that ties go to the lower expert.
    if (serving.tokens(expert) > serving.tokens(best)) best = expert;
  }
  return best;
}

}  // namespace

void Chain::Fill(Serving& serving, int32_t limit, DonorRule rule) {
  serving.Reset();
  Start(serving, limit);
  while (!rooms_.empty() && !donors_.empty()) {
    std::pop_heap(rooms_.begin(), rooms_.end());
    const Room receiver = rooms_.back();
    rooms_.pop_back();
    Give(serving, limit, PickDonor(serving, limit, receiver.tokens(), rule), receiver, rule);
  }
}

void Chain::Start(const Serving& serving, int32_t limit) {
  std::fill(used_.begin(), used_.end(), 0);
  std::fill(sent_.begin(), sent_.end(), 0);
  donors_.clear();
  rooms_.clear();
  for (uint32_t rank = 0; rank < serving.num_ranks(); ++rank) {
    const int32_t load = serving.load(rank);
    if (load > limit && fan_out_ > 0) {
      donors_.push_back(rank);
      start_[rank] = load;
      hottest_[rank] = Hottest(serving, rank);
    } else if (load < limit && slots_ > 0) {
      rooms_.push_back(Room(limit - load, rank));
    }
  }
  // A rank is in the heap at most once: it leaves when it receives and returns with its remaining room.
  std::make_heap(rooms_.begin(), rooms_.end());
}

void Chain::AddRoom(int32_t tokens, uint32_t rank) {
  if (tokens <= 0 || used_[rank] == slots_) return;
  rooms_.push_back(Room(tokens, rank));
  std::push_heap(rooms_.begin(), rooms_.end());
}

// Returns the donor of the largest key, which is at least 0.
template <typename Key>
uint32_t Chain::Most(Key key) const {
  uint32_t best = 0;
  int64_t best_key = -1;
  for (const uint32_t rank : donors_) {
    const int64_t its_key = key(rank);
    // Donors are in ascending order, so that ties go to the lower rank.
    const bool is_more = its_key > best_key;
    best_key = is_more ? its_key : best_key;
    best = is_more ? rank : best;
  }
  return best;
}

uint32_t Chain::PickDonor(const Serving& serving, int32_t limit, int32_t room, DonorRule rule) const {
  // Two keys are packed into one number, the major one in the high bits. Tokens are below 2^31, so their product fits
  // int64.
  constexpr int64_t kAbove = int64_t{1} << 31;  // above all tokens
  const auto hottest = [&](uint32_t rank) { return serving.tokens(hottest_[rank]); };
  const auto surplus = [&](uint32_t rank) { return serving.load(rank) - limit; };
  switch (rule) {
    case DonorRule::kSurplus:
      return Most([&](uint32_t rank) { return hottest(rank) >= room ? kAbove + surplus(rank) : hottest(rank); });
    case DonorRule::kUseful:
      return Most(
          [&](uint32_t rank) { return std::min({hottest(rank), surplus(rank), room}) * kAbove + hottest(rank); });
    case DonorRule::kHottest:
      return Most(hottest);
    case DonorRule::kSequential:
      return Most([&](uint32_t rank) { return start_[rank]; });
  }
  return 0;
}

void Chain::Give(Serving& serving, int32_t limit, uint32_t donor, Room receiver, DonorRule rule) {
  const uint32_t expert = hottest_[donor];
  // The piece closes the receiver, takes the whole expert, or (kSequential) ends the donor. So no rank gets the same
  // expert twice, as Serving requires.
  int32_t tokens = std::min(serving.tokens(expert), receiver.tokens());
  if (rule == DonorRule::kSequential) tokens = std::min(tokens, serving.load(donor) - limit);
  serving.Add(expert, receiver.rank(), tokens);
  ++used_[receiver.rank()];
  ++sent_[donor];
  AddRoom(receiver.tokens() - tokens, receiver.rank());
  const int32_t surplus = serving.load(donor) - limit;
  if (surplus > 0 && sent_[donor] < fan_out_) {
    hottest_[donor] = Hottest(serving, donor);
    return;
  }
  // The other donors keep their order, see Most. If the donor stopped at its fan-out, its room is negative and AddRoom
  // ignores it.
  donors_.erase(std::find(donors_.begin(), donors_.end(), donor));
  AddRoom(-surplus, donor);
}

}  // namespace moe_lb
