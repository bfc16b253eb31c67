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
    Give(serving, PickDonor(receiver.tokens(), rule), receiver, rule);
  }
}

void Chain::Start(const Serving& serving, int32_t limit) {
  std::fill(used_.begin(), used_.end(), 0);
  donors_.clear();
  rooms_.clear();
  for (uint32_t rank = 0; rank < serving.num_ranks(); ++rank) {
    const int32_t load = serving.load(rank);
    if (load > limit && fan_out_ > 0) {
      const uint32_t expert = Hottest(serving, rank);
      donors_.push_back({rank, expert, serving.tokens(expert), load - limit, load, 0});
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
Chain::Donor* Chain::Most(Key key) {
  Donor* best = nullptr;
  int64_t best_key = -1;
  for (Donor& donor : donors_) {
    const int64_t its_key = key(donor);
    // Donors are in ascending order, so that ties go to the lower rank.
    const bool is_more = its_key > best_key;
    best_key = is_more ? its_key : best_key;
    best = is_more ? &donor : best;
  }
  return best;
}

Chain::Donor* Chain::PickDonor(int32_t room, DonorRule rule) {
  // Two keys are packed into one number, the major one in the high bits. Tokens are below 2^31, so their product fits
  // int64.
  constexpr int64_t kAbove = int64_t{1} << 31;  // above all tokens
  switch (rule) {
    case DonorRule::kSurplus:
      return Most(
          [=](const Donor& donor) { return donor.hottest >= room ? kAbove + donor.surplus : int64_t{donor.hottest}; });
    case DonorRule::kUseful:
      return Most(
          [=](const Donor& donor) { return std::min({donor.hottest, donor.surplus, room}) * kAbove + donor.hottest; });
    case DonorRule::kHottest:
      return Most([](const Donor& donor) { return donor.hottest; });
    case DonorRule::kSequential:
      return Most([](const Donor& donor) { return donor.start; });
  }
  return nullptr;
}

void Chain::Give(Serving& serving, Donor* donor, Room receiver, DonorRule rule) {
  // The piece closes the receiver, takes the whole expert, or (kSequential) ends the donor. So no rank gets the same
  // expert twice, as Serving requires.
  int32_t tokens = std::min(donor->hottest, receiver.tokens());
  if (rule == DonorRule::kSequential) tokens = std::min(tokens, donor->surplus);
  serving.Add(donor->expert, receiver.rank(), tokens);
  ++used_[receiver.rank()];
  ++donor->sent;
  donor->surplus -= tokens;
  AddRoom(receiver.tokens() - tokens, receiver.rank());
  if (donor->surplus > 0 && donor->sent < fan_out_) {
    donor->expert = Hottest(serving, donor->rank);
    donor->hottest = serving.tokens(donor->expert);
    return;
  }
  // If the donor stopped at its fan-out, its room is negative and AddRoom ignores it.
  AddRoom(-donor->surplus, donor->rank);
  // The other donors keep their order, see Most.
  donors_.erase(donors_.begin() + (donor - donors_.data()));
}

}  // namespace moe_lb
