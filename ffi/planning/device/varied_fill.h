// Constructive placement in a varied order by one warp: `VariedChain` of ffi/planning.
#pragma once

#include "ffi/planning/device/fill.h"
#include "ffi/planning/device/flow.h"
#include "ffi/planning/variation.h"

namespace moe_lb::device {

template <typename T, int W>
class VariedFill {
 public:
  // Fills a flow as `VariedChain::Fill`. fan_out: at least 1.
  static MOE_LB_DEVICE void Run(const T& t, Flow<T, W>& flow, const HomeTokens<T>& home, int32_t limit,
                                const Variation& variation, int32_t fan_out) {
    flow.Reset(t, home.tokens, home.load);
    VariedFill fill(t, flow, home, limit, variation, fan_out);
    t.SyncWarp();
    while (fill.Give()) t.SyncWarp();
    flow.Write(t, fill.load_, fill.used_);
  }

 private:
  MOE_LB_DEVICE VariedFill(const T& t, Flow<T, W>& flow, const HomeTokens<T>& home, int32_t limit,
                           const Variation& variation, int32_t fan_out)
      : t_(t), flow_(flow), limit_(limit), variation_(variation) {
    for (int k = 0; k < W; ++k) {
      const int rank = kLanes * k + t.lane();
      const bool exists = rank < flow.shape.num_ranks;
      load_[k] = exists ? static_cast<int32_t>(home.load[rank]) : limit;
      goal_[k] = variation.Goal(static_cast<uint32_t>(rank), limit);
      left_[k] = fan_out;
      used_[k] = 0;
      hottest_[k] = rank * flow.shape.home;
      hot_tokens_[k] = 0;
      room_[k] = 0;
      key_[k] = 0;
      if (!exists) continue;
      uint32_t most = 0;
      for (int expert = rank * flow.shape.home; expert < (rank + 1) * flow.shape.home; ++expert) {
        const int32_t tokens = home.tokens[expert];
        const uint32_t key = KeyOf(expert, tokens);
        if (key <= most) continue;
        most = key;
        hottest_[k] = expert;
        hot_tokens_[k] = tokens;
      }
      Update(k, most);
    }
  }

  MOE_LB_DEVICE uint32_t KeyOf(int expert, int32_t tokens) const {
    return Variation::Weighted(tokens, variation_.Liking(static_cast<uint32_t>(expert)));
  }

  // Sets whether a rank of this lane gives or receives. most: the weighted tokens of its hottest expert.
  MOE_LB_DEVICE void Update(int k, uint32_t most) {
    const int rank = kLanes * k + t_.lane();
    if (load_[k] <= goal_[k]) goal_[k] = limit_;
    const bool gives = load_[k] > goal_[k];
    const bool receives = !gives && used_[k] < flow_.shape.slots;
    room_[k] = receives ? Variation::Weighted(limit_ - load_[k], variation_.Welcome(static_cast<uint32_t>(rank))) : 0;
    key_[k] = gives && left_[k] > 0 ? variation_.DonorKey(most, load_[k], limit_) : 0;
  }

  // Adds one replica; false if there is no receiver or no donor.
  MOE_LB_DEVICE bool Give() {
    const bool stays = receiver_ >= 0 && variation_.Stays() && ValueOf<W>(t_, room_, Most(receiver_, 0)) > 0;
    if (!stays) receiver_ = FindPeak<W>(t_, room_).rank;
    const int receiver = receiver_, donor = FindPeak<W>(t_, key_).rank;
    if (receiver < 0 || donor < 0) return false;
    const int expert = ValueOf<W>(t_, hottest_, donor);
    const int32_t hot = ValueOf<W>(t_, hot_tokens_, donor);
    const int32_t tokens = Least(hot, limit_ - ValueOf<W>(t_, load_, receiver));
    flow_.Record(t_, expert, receiver, ValueOf<W>(t_, used_, receiver), tokens);
    int next = expert;
    int32_t next_tokens = 0;
    const uint32_t most = FindHottest(donor, expert, hot - tokens, &next, &next_tokens);
    for (int k = 0; k < W; ++k) {
      const int rank = kLanes * k + t_.lane();
      if (rank == receiver) {
        load_[k] += tokens;
        ++used_[k];
        Update(k, 0);
      }
      if (rank == donor) {
        load_[k] -= tokens;
        --left_[k];
        hottest_[k] = next;
        hot_tokens_[k] = next_tokens;
        Update(k, most);
      }
    }
    return true;
  }

  // The first home expert of a rank with the most tokens, weighted; `expert` is left with `rest`, which lane 0 has just
  // written. Returns its weighted tokens.
  MOE_LB_DEVICE uint32_t FindHottest(int rank, int expert, int32_t rest, int* hottest, int32_t* tokens) const {
    uint32_t most = 0;
    for (int base = 0; base < flow_.shape.home; base += kLanes) {
      const int place = base + t_.lane(), its = rank * flow_.shape.home + place;
      int32_t mine = 0;
      if (place < flow_.shape.home) mine = its == expert ? rest : static_cast<int32_t>(flow_.tokens[its]);
      const uint32_t key = place < flow_.shape.home ? KeyOf(its, mine) : 0;
      const uint32_t largest = t_.Max(key);
      const uint32_t found = t_.Ballot(key == largest);
      if (largest <= most) continue;
      most = largest;
      *hottest = rank * flow_.shape.home + base + LowestBit(found);
      *tokens = t_.From(mine, LowestBit(found));
    }
    return most;
  }

  const T& t_;
  Flow<T, W>& flow_;
  int32_t limit_;
  Variation variation_;
  int receiver_ = -1;  // the last
  // Of the ranks of this lane.
  int32_t load_[size_t{W}], goal_[size_t{W}], left_[size_t{W}];
  uint32_t room_[size_t{W}];  // weighted; 0 for ranks that cannot receive
  uint32_t key_[size_t{W}];   // 0 for ranks that do not give
  int32_t hot_tokens_[size_t{W}];
  int hottest_[size_t{W}], used_[size_t{W}];
};

}  // namespace moe_lb::device
