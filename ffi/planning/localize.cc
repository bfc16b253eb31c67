#include "ffi/planning/localize.h"

#include <algorithm>
#include <cstdlib>
#include <vector>

namespace moe_lb {
namespace {

class Localizer {
 public:
  Localizer(Serving& serving, MatrixView<const int32_t> counts, int32_t limit, size_t slots)
      : serving_(serving), counts_(counts), limit_(limit), slots_(slots), used_(serving.num_ranks(), 0) {
    replicas_.reserve(serving.num_replicas());
    tokens_.reserve(serving.num_replicas());
    for (auto entry = static_cast<uint32_t>(serving.num_experts()); entry < serving.num_entries(); ++entry) {
      if (serving.removed(entry)) continue;
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
  int64_t Gain(uint32_t entry, uint32_t to) const {
    const uint32_t expert = serving_.expert(entry);
    const int32_t tokens = serving_.tokens(entry);
    return std::min(counts_[to][expert], tokens) - std::min(counts_[serving_.rank(entry)][expert], tokens);
  }

  // The sum is a load of the new plan, so that it fits int32.
  bool Fits(uint32_t rank, int32_t more) const { return serving_.load(rank) + more <= limit_; }

  void TryMove(uint32_t entry, uint32_t to) {
    // Compute the gain last: counts are spread over memory, and few ranks have room.
    if (used_[to] == slots_ || !Fits(to, serving_.tokens(entry))) return;
    if (serving_.Holds(to, serving_.expert(entry)) || Gain(entry, to) <= 0) return;
    --used_[serving_.rank(entry)];
    ++used_[to];
    serving_.MoveReplica(entry, to);
    FindRoom();
  }

  void TryExchange(uint32_t a, uint32_t b) {
    const uint32_t rank_a = serving_.rank(a);
    const uint32_t rank_b = serving_.rank(b);
    const int32_t more = serving_.tokens(b) - serving_.tokens(a);
    if (!Fits(rank_a, more) || !Fits(rank_b, -more)) return;
    // No rank may hold an expert twice. This also excludes two replicas of one expert, and two on one rank.
    if (serving_.Holds(rank_b, serving_.expert(a)) || serving_.Holds(rank_a, serving_.expert(b))) return;
    if (Gain(a, rank_b) + Gain(b, rank_a) <= 0) return;
    serving_.MoveReplica(a, rank_b);
    serving_.MoveReplica(b, rank_a);
    FindRoom();
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
  std::vector<size_t> used_;  // [R]
  std::vector<uint32_t> replicas_;
  std::vector<int32_t> tokens_;  // of replicas_
  int32_t room_ = 0;             // maximum room of a rank below the limit
};

}  // namespace

void Localize(Serving& serving, MatrixView<const int32_t> counts, int32_t limit, size_t slots) {
  Localizer(serving, counts, limit, slots).Run();
}

}  // namespace moe_lb
