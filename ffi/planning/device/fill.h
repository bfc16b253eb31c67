// Constructive placement by one warp: `Chain` of ffi/planning.
#pragma once

#include "ffi/planning/chain.h"
#include "ffi/planning/device/flow.h"

namespace moe_lb::device {

// Tokens of one domain before planning, read by all warps.
template <typename T>
struct HomeTokens {
  typename T::template Array<int32_t> tokens;    // [E]
  typename T::template Array<int32_t> load;      // [R]
  typename T::template Array<uint16_t> hottest;  // [R], the first home expert with the most tokens
};

template <typename T, int W>
class Fill {
 public:
  // Fills a flow as `Chain::Fill`. fan_out: at least 1.
  static MOE_LB_DEVICE void Run(const T& t, Flow<T, W>& flow, const HomeTokens<T>& home, int32_t limit, DonorRule rule,
                                int32_t fan_out) {
    flow.Reset(t, home.tokens, home.load);
    Fill fill(t, flow, home, limit, rule, fan_out);
    t.SyncWarp();
    while (fill.Give()) t.SyncWarp();
    flow.Write(t, fill.load_, fill.used_);
  }

 private:
  MOE_LB_DEVICE Fill(const T& t, Flow<T, W>& flow, const HomeTokens<T>& home, int32_t limit, DonorRule rule,
                     int32_t fan_out)
      : t_(t), flow_(flow), limit_(limit), rule_(rule) {
    for (int k = 0; k < W; ++k) {
      const int rank = kLanes * k + t.lane();
      const bool exists = rank < flow.shape.num_ranks;
      load_[k] = exists ? static_cast<int32_t>(home.load[rank]) : limit;
      start_[k] = load_[k];
      used_[k] = 0;
      left_[k] = fan_out;
      room_[k] = flow.shape.slots > 0 ? Most(limit - load_[k], 0) : 0;
      donates_[k] = load_[k] > limit;
      hottest_[k] = donates_[k] ? static_cast<int>(home.hottest[rank]) : 0;
      hot_tokens_[k] = donates_[k] ? static_cast<int32_t>(home.tokens[hottest_[k]]) : 0;
    }
  }

  // Adds one replica; false if there is no receiver or no donor.
  MOE_LB_DEVICE bool Give() {
    uint32_t most = 0;
    for (int k = 0; k < W; ++k) most = Most(most, static_cast<uint32_t>(room_[k]));
    const auto room = static_cast<int32_t>(t_.Max(most));
    if (room == 0) return false;
    Ranks<W> able;
    for (int k = 0; k < W; ++k) able.words[k] = t_.Ballot(room_[k] == room);
    const int receiver = able.Lowest();
    const int donor = PickDonor(room);
    if (donor < 0) return false;
    const int lane = donor % kLanes;
    const int expert = t_.From(Of(hottest_, donor), lane);
    const int32_t hot = t_.From(Of(hot_tokens_, donor), lane);
    const int32_t surplus = t_.From(Of(load_, donor), lane) - limit_;
    const int32_t left = t_.From(Of(left_, donor), lane) - 1;
    int32_t tokens = Least(hot, room);
    if (rule_ == DonorRule::kSequential) tokens = Least(tokens, surplus);
    flow_.Record(t_, expert, receiver, t_.From(Of(used_, receiver), receiver % kLanes), tokens);
    const bool goes_on = surplus > tokens && left > 0;
    int next = expert;
    int32_t next_tokens = 0;
    if (goes_on) FindHottest(donor, expert, hot - tokens, &next, &next_tokens);
    for (int k = 0; k < W; ++k) {
      const int rank = kLanes * k + t_.lane();
      if (rank == receiver) Receive(k, tokens);
      if (rank == donor) Donate(k, tokens, goes_on, next, next_tokens);
    }
    return true;
  }

  // The donor of the largest key above 0, or -1. All keys of donors are above 0: a donor only has tokens of its home
  // experts, and more than the limit.
  MOE_LB_DEVICE int PickDonor(int32_t room) const {
    uint32_t keys[size_t{W}];
    for (int k = 0; k < W; ++k) {
      const int32_t surplus = load_[k] - limit_;
      const auto hot = static_cast<uint32_t>(hot_tokens_[k]);
      uint32_t key = hot;
      if (rule_ == DonorRule::kSurplus && hot_tokens_[k] >= room) key = 0x80000000u + static_cast<uint32_t>(surplus);
      if (rule_ == DonorRule::kUseful) key = static_cast<uint32_t>(Least(Least(hot_tokens_[k], surplus), room));
      if (rule_ == DonorRule::kSequential) key = static_cast<uint32_t>(start_[k]);
      keys[k] = donates_[k] ? key : 0;
    }
    Ranks<W> best = Largest(keys);
    if (rule_ == DonorRule::kUseful && best.Any()) {
      for (int k = 0; k < W; ++k) {
        keys[k] = (best.words[k] >> t_.lane() & 1) != 0 ? static_cast<uint32_t>(hot_tokens_[k]) : 0;
      }
      best = Largest(keys);
    }
    return best.Lowest();
  }

  MOE_LB_DEVICE Ranks<W> Largest(const uint32_t (&keys)[size_t{W}]) const {
    uint32_t mine = 0;
    for (int k = 0; k < W; ++k) mine = Most(mine, keys[k]);
    const uint32_t largest = t_.Max(mine);
    Ranks<W> ranks;
    for (int k = 0; k < W; ++k) ranks.words[k] = t_.Ballot(largest != 0 && keys[k] == largest);
    return ranks;
  }

  template <typename V>
  static MOE_LB_DEVICE V Of(const V (&values)[size_t{W}], int rank) {
    V value = values[0];
    for (int k = 1; k < W; ++k) value = rank / kLanes == k ? values[k] : value;
    return value;
  }

  // The first home expert of a rank with the most tokens; `expert` is left with `rest`, which lane 0 has just written.
  MOE_LB_DEVICE void FindHottest(int rank, int expert, int32_t rest, int* hottest, int32_t* tokens) const {
    uint32_t most = 0;
    for (int base = 0; base < flow_.shape.home; base += kLanes) {
      const int place = base + t_.lane(), its = rank * flow_.shape.home + place;
      uint32_t mine = 0;
      if (place < flow_.shape.home) {
        mine = its == expert ? static_cast<uint32_t>(rest) : static_cast<uint32_t>(flow_.tokens[its]);
      }
      const uint32_t largest = t_.Max(mine);
      const uint32_t found = t_.Ballot(place < flow_.shape.home && mine == largest);
      if (base > 0 && largest <= most) continue;
      most = largest;
      *hottest = rank * flow_.shape.home + base + LowestBit(found);
    }
    *tokens = static_cast<int32_t>(most);
  }

  MOE_LB_DEVICE void Receive(int k, int32_t tokens) {
    load_[k] += tokens;
    ++used_[k];
    room_[k] = used_[k] == flow_.shape.slots ? 0 : room_[k] - tokens;
  }

  MOE_LB_DEVICE void Donate(int k, int32_t tokens, bool goes_on, int hottest, int32_t hot_tokens) {
    load_[k] -= tokens;
    --left_[k];
    hottest_[k] = hottest;
    hot_tokens_[k] = hot_tokens;
    if (goes_on) return;
    // A donor that gave more than its surplus has room. One that stopped at its fan-out has none.
    donates_[k] = false;
    room_[k] = used_[k] == flow_.shape.slots ? 0 : Most(limit_ - load_[k], 0);
  }

  const T& t_;
  Flow<T, W>& flow_;
  int32_t limit_;
  DonorRule rule_;
  int32_t load_[size_t{W}], start_[size_t{W}];
  int32_t room_[size_t{W}];  // 0 for ranks that cannot receive
  int32_t hot_tokens_[size_t{W}];
  int hottest_[size_t{W}];
  int32_t left_[size_t{W}];  // replicas that the experts of the rank may still get
  int used_[size_t{W}];
  bool donates_[size_t{W}];
};

}  // namespace moe_lb::device
