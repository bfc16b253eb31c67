// Search orders of `VariedChain`: its choices weighted by hashed noise.
//
// The same integers on CPUs and GPUs, from the number of the order alone.
#pragma once

#include <cstdint>

#include "ffi/planning/anywhere.h"

namespace moe_lb {

// Orders tried before the best maximum is compared, so that a GPU tries them side by side.
constexpr int kVariedAtOnce = 3;

// Rounds of that many orders, and the number of rounds without a lower maximum that ends them. Few for many replicas,
// because a chain takes longer.
struct VariedRounds {
  int number;
  int patience;

  MOE_LB_ANYWHERE explicit VariedRounds(int64_t num_slots) {
    const int64_t rounds = 1600 / num_slots;
    number = rounds < 4 ? 4 : rounds > 50 ? 50 : static_cast<int>(rounds);
    patience = number < 8 ? 4 : number / 2;
  }
};

class Variation {
 public:
  MOE_LB_ANYWHERE explicit Variation(uint32_t number) : number_(number) {}

  // Weight of an expert's tokens in the choice of the hottest: 1024 +- 154 at most.
  MOE_LB_ANYWHERE uint32_t Liking(uint32_t expert) const { return Weight(0, expert, 154); }

  // Weight of a rank's room in the choice of the receiver: 1024 +- 512 at most.
  MOE_LB_ANYWHERE uint32_t Welcome(uint32_t rank) const { return Weight(1, rank, 512); }

  // Weight of a rank's load above the limit beside the tokens of its hottest expert: 0 to 1023.
  MOE_LB_ANYWHERE uint32_t Pressing() const {
    const int32_t noise = Noise(3, 0);
    return noise > 0 ? static_cast<uint32_t>(noise) : 0;
  }

  // Whether a rank receives until it is full, so that the hottest experts go to the emptiest ranks.
  MOE_LB_ANYWHERE bool Stays() const { return number_ % 4 == 2; }

  // Load down to which a rank above it gives before it receives: up to a tenth below the limit for every second order.
  MOE_LB_ANYWHERE int32_t Goal(uint32_t rank, int32_t limit) const {
    const int64_t below = number_ % 2 == 0 ? 0 : static_cast<int64_t>(limit / 10) * Noise(2, rank) / 1024;
    return below > 0 ? limit - static_cast<int32_t>(below) : limit;
  }

  // The limit to try: below the best maximum by one token to half of its distance to the mean.
  MOE_LB_ANYWHERE int32_t Limit(int32_t best, int32_t mean) const {
    const int32_t lower = (best - mean) >> (1 + number_ / 8 % 8);
    return best - (lower > 1 ? lower : 1);
  }

  // Tokens by a weight: at least 1 if there are any.
  static MOE_LB_ANYWHERE uint32_t Weighted(int32_t tokens, uint32_t weight) {
    const auto product = static_cast<uint32_t>(static_cast<uint64_t>(tokens) * weight >> 10);
    return product == 0 && tokens > 0 ? 1 : product;
  }

  // The key of a donor: its hottest expert, weighted, and its load above the limit.
  MOE_LB_ANYWHERE uint32_t DonorKey(uint32_t hottest, int32_t load, int32_t limit) const {
    const int32_t above = load > limit ? load - limit : 0;
    const uint64_t key = hottest + (static_cast<uint64_t>(above) * Pressing() >> 10);
    return key < UINT32_MAX ? static_cast<uint32_t>(key) : UINT32_MAX;
  }

 private:
  // Pseudo-random from -1024 to 1023: a hash, because a GPU computes it where it is used.
  MOE_LB_ANYWHERE int32_t Noise(uint32_t kind, uint32_t index) const {
    uint32_t bits = (4 * index + kind) * 0x9E3779B9u + number_ * 0x85EBCA6Bu;
    bits = (bits ^ bits >> 16) * 0x7FEB352Du;
    bits = (bits ^ bits >> 15) * 0x846CA68Bu;
    return static_cast<int32_t>((bits ^ bits >> 16) >> 21) - 1024;
  }

  // The best amplitude depends on the load, so it is halved up to three times.
  MOE_LB_ANYWHERE uint32_t Weight(uint32_t kind, uint32_t index, int32_t reach) const {
    return static_cast<uint32_t>(1024 + Noise(kind, index) * (reach >> number_ / 2 % 4) / 1024);
  }

  uint32_t number_;
};

}  // namespace moe_lb
