#include "ffi/planning/localize.h"

#include <algorithm>
#include <cstdlib>
#include <vector>

namespace moe_lb {
namespace {

class Localizer {
 public:
  Localizer(Serving& serving, MatrixView<const int32_t> counts, int32_t limit, size_t slots)
      : serving_(serving),
        counts_(counts),
        limit_(limit),
        slots_(slots),
        used_(serving.num_ranks(), 0),
        holds_(serving.num_ranks() * serving.num_experts(), 0) {
    for (uint32_t entry = 0; entry < serving.num_entries(); ++entry) {
      if (serving.removed(entry)) continue;
      holds_[Pair(serving.rank(entry), serving.expert(entry))] = 1;
      if (entry < serving.num_experts()) continue;
      ++used_[serving.rank(entry)];
      replicas_.push_back(entry);
      tokens_.push_back(serving.tokens(entry));
    }
    FindRoom();
  }

  // Tries every move and every exchange once. Most pairs differ by more tokens than the room of any rank, and one
  // comparison excludes them before all other checks.
  void Run() {
    for (size_t i = 0; i < replicas_.size(); ++i) {
      for (uint32_t rank = 0; rank < serving_.num_ranks() && tokens_[i] <= room_; ++rank) TryMove(replicas_[i], rank);
      for (size_t j = i + 1; j < replicas_.size(); ++j) {
        if (std::abs(tokens_[i] - tokens_[j]) <= room_) TryExchange(replicas_[i], replicas_[j]);
      }
    }
  }

 private:
  size_t Pair(uint32_t rank, uint32_t expert) const { return rank * serving_.num_experts() + expert; }

  int64_t Gain(uint32_t entry, uint32_t to) const {
    const uint32_t expert = serving_.expert(entry);
    const int32_t tokens = serving_.tokens(entry);
    return std::min(counts_[to][expert], tokens) - std::min(counts_[serving_.rank(entry)][expert], tokens);
  }

  // A rank losing tokens always fits, even at the limit.
  bool Fits(uint32_t rank, int32_t more) const { return more <= 0 || serving_.load(rank) <= limit_ - more; }

  void TryMove(uint32_t entry, uint32_t to) {
    // Compute the gain last: counts are spread over memory, and few ranks have room.
    if (used_[to] == slots_ || !Fits(to, serving_.tokens(entry))) return;
    if (holds_[Pair(to, serving_.expert(entry))] != 0 || Gain(entry, to) <= 0) return;
    --used_[serving_.rank(entry)];
    ++used_[to];
    Move(entry, to);
    FindRoom();
  }

  void TryExchange(uint32_t a, uint32_t b) {
    const uint32_t rank_a = serving_.rank(a);
    const uint32_t rank_b = serving_.rank(b);
    const int32_t more = serving_.tokens(b) - serving_.tokens(a);
    if (!Fits(rank_a, more) || !Fits(rank_b, -more)) return;
    // No rank may hold an expert twice. This also excludes two replicas of one expert, and two on one rank.
    if (holds_[Pair(rank_b, serving_.expert(a))] != 0 || holds_[Pair(rank_a, serving_.expert(b))] != 0) return;
    if (Gain(a, rank_b) + Gain(b, rank_a) <= 0) return;
    Move(a, rank_b);
    Move(b, rank_a);
    FindRoom();
  }

  void Move(uint32_t entry, uint32_t to) {
    holds_[Pair(serving_.rank(entry), serving_.expert(entry))] = 0;
    holds_[Pair(to, serving_.expert(entry))] = 1;
    serving_.MoveReplica(entry, to);
  }

  // Recomputed only after a move, because loads do not change otherwise.
  void FindRoom() {
    room_ = 0;
    for (uint32_t rank = 0; rank < serving_.num_ranks(); ++rank) room_ = std::max(room_, limit_ - serving_.load(rank));
  }

  Serving& serving_;
  MatrixView<const int32_t> counts_;
  int32_t limit_;
  size_t slots_;
  std::vector<size_t> used_;    // [R]
  std::vector<uint8_t> holds_;  // [R, E]
  std::vector<uint32_t> replicas_;
  std::vector<int32_t> tokens_;  // of replicas_
  int32_t room_ = 0;             // maximum room of a rank below the limit
};

}  // namespace

void Localize(Serving& serving, MatrixView<const int32_t> counts, int32_t limit, size_t slots) {
  Localizer(serving, counts, limit, slots).Run();
}

}  // namespace moe_lb
