// A set of ranks as words of bits.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace moe_lb {

// Up to 64 * W ranks.
template <size_t W>
class RankSet {
 public:
  static constexpr size_t kMaxRanks = 64 * W;

  RankSet() = default;

  // From the bits of the first 64 ranks.
  explicit RankSet(uint64_t word) { words_[0] = word; }

  bool Has(uint32_t rank) const { return (words_[rank / 64] >> rank % 64 & 1) != 0; }
  void Add(uint32_t rank) { words_[rank / 64] |= uint64_t{1} << rank % 64; }
  void Drop(uint32_t rank) { words_[rank / 64] &= ~(uint64_t{1} << rank % 64); }

  // Returns whether all ranks are in `other`.
  bool IsInside(const RankSet& other) const {
    uint64_t outside = 0;
    for (size_t i = 0; i < W; ++i) outside |= words_[i] & ~other.words_[i];
    return outside == 0;
  }

  bool operator==(const RankSet& other) const { return words_ == other.words_; }

 private:
  std::array<uint64_t, W> words_ = {};
};

}  // namespace moe_lb
