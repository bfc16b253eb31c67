#include "ffi/planning/one_pass.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace moe_lb {

OnePass::OnePass(size_t num_ranks, size_t slots, size_t fan_out)
    : slots_(slots), fan_out_(fan_out), used_(num_ranks), sent_(num_ranks), surplus_(num_ranks), room_(num_ranks) {}

void OnePass::Start(Serving& serving, int32_t limit) {
  serving.Reset();
  std::fill(used_.begin(), used_.end(), 0);
  std::fill(sent_.begin(), sent_.end(), 0);
  place_.clear();
  for (uint32_t rank = 0; rank < serving.num_ranks(); ++rank) {
    surplus_[rank] = std::max(serving.load(rank) - limit, 0);
    room_[rank] = std::max(limit - serving.load(rank), 0);
  }
}

void OnePass::Make(Serving& serving, const Offer& offer) {
  const auto home = static_cast<uint32_t>(offer.expert / serving.home_experts());
  place_.push_back(static_cast<uint32_t>(offer.rank * slots_ + used_[offer.rank]));
  serving.Add(offer.expert, offer.rank, offer.tokens);
  ++used_[offer.rank];
  ++sent_[home];
  room_[offer.rank] -= offer.tokens;
}

// ---- Greedy --------------------------------------------------------------------

void OnePass::FillGreedy(Serving& serving, int32_t mean) {
  Start(serving, mean);
  for (auto most = std::max_element(surplus_.begin(), surplus_.end()); *most > 0;
       most = std::max_element(surplus_.begin(), surplus_.end())) {
    DonateFrom(serving, static_cast<uint32_t>(most - surplus_.begin()));
  }
}

void OnePass::DonateFrom(Serving& serving, uint32_t donor) {
  const Offer kept = BestReplica(serving, donor);
  Offer made = BestNew(serving, donor);
  const bool makes = made.tokens > kept.tokens;
  const int32_t tokens = std::min(makes ? made.tokens : kept.tokens, surplus_[donor]);
  surplus_[donor] = tokens == 0 ? 0 : surplus_[donor] - tokens;
  if (tokens == 0) return;
  if (makes) {
    made.tokens = tokens;
    Make(serving, made);
    return;
  }
  serving.MoveTokens(kept.entry, tokens);
  room_[serving.rank(kept.entry)] -= tokens;
}

OnePass::Offer OnePass::BestReplica(const Serving& serving, uint32_t donor) const {
  Offer best;
  uint32_t best_place = 0;
  for (auto entry = static_cast<uint32_t>(serving.num_experts()); entry < serving.num_entries(); ++entry) {
    const uint32_t expert = serving.expert(entry);
    if (serving.rank(expert) != donor) continue;
    const int32_t tokens = std::min(serving.tokens(expert), room_[serving.rank(entry)]);
    const uint32_t place = place_[entry - serving.num_experts()];
    if (tokens < best.tokens || (tokens == best.tokens && place >= best_place)) continue;
    best = {expert, entry, 0, tokens};
    best_place = place;
  }
  return best;
}

OnePass::Offer OnePass::BestNew(const Serving& serving, uint32_t donor) const {
  Offer best;
  if (sent_[donor] == fan_out_) return best;
  int32_t room = 0;
  for (uint32_t rank = 0; rank < serving.num_ranks(); ++rank) {
    // Strictly more room is required, so that ties go to the lower rank.
    if (room_[rank] <= room || used_[rank] == slots_) continue;
    room = room_[rank];
    best.rank = rank;
  }
  if (room == 0) return best;
  const auto first = static_cast<uint32_t>(donor * serving.home_experts());
  for (uint32_t expert = first; expert < first + serving.home_experts(); ++expert) {
    if (serving.tokens(expert) <= best.tokens || serving.Holds(best.rank, expert)) continue;
    best.expert = expert;
    best.tokens = serving.tokens(expert);
  }
  best.tokens = std::min(best.tokens, room);
  return best;
}

// ---- UltraEP -------------------------------------------------------------------

void OnePass::FillUltraEp(Serving& serving, int32_t mean) {
  serving.Reset();
  const int32_t high = serving.MaxLoad();
  // Compared before the conversion, because the product may exceed the range of integers.
  const float first = std::ceil(static_cast<float>(mean) * kUltraEpRise);
  const int32_t limit = first >= static_cast<float>(high) ? high : std::max(mean, static_cast<int32_t>(first));
  Start(serving, limit);
  by_load_.resize(serving.num_ranks());
  std::iota(by_load_.begin(), by_load_.end(), 0);
  // Both sorts are stable, so that ties go to the lower rank and expert.
  std::stable_sort(by_load_.begin(), by_load_.end(), [&](uint32_t a, uint32_t b) { return surplus_[a] > surplus_[b]; });
  for (const uint32_t donor : by_load_) {
    if (surplus_[donor] == 0 || !Give(serving, donor, limit)) return;
  }
}

// Returns whether the surplus of the donor fits.
bool OnePass::Give(Serving& serving, uint32_t donor, int32_t limit) {
  by_tokens_.resize(serving.home_experts());
  std::iota(by_tokens_.begin(), by_tokens_.end(), static_cast<uint32_t>(donor * serving.home_experts()));
  std::stable_sort(by_tokens_.begin(), by_tokens_.end(),
                   [&](uint32_t a, uint32_t b) { return serving.tokens(a) > serving.tokens(b); });
  for (const uint32_t expert : by_tokens_) {
    // The home keeps one token.
    while (serving.tokens(expert) > 1) {
      Offer offer = {expert, 0, 0, 0};
      int32_t candidates = 0;
      for (uint32_t rank = 0; rank < serving.num_ranks(); ++rank) {
        if (room_[rank] == 0 || used_[rank] == slots_ || serving.Holds(rank, expert)) continue;
        ++candidates;
        if (room_[rank] <= offer.tokens) continue;
        offer.rank = rank;
        offer.tokens = room_[rank];
      }
      if (candidates == 0) break;
      const int32_t need = serving.load(donor) - limit;
      offer.tokens = std::min({need, offer.tokens, serving.tokens(expert) - 1});
      const int32_t floor = need / candidates + (need % candidates != 0 ? 1 : 0);
      if (offer.tokens < floor || sent_[donor] == fan_out_) break;
      Make(serving, offer);
      if (offer.tokens == need) return true;
    }
  }
  return false;
}

}  // namespace moe_lb
