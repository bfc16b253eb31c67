// `UltraEp` of ffi/planning as one launch: a block for each domain, and a warp for each attempt at a limit. Equal
// plans.
//
// The three attempts with the dynamic floor and the first of the search run at once, then up to four of the search. The
// first success of each round is kept, and the next round writes to other lists.
#pragma once

#include <cmath>

#include "ffi/planning/device/edit.h"

namespace moe_lb::device {

template <typename T, int W>
class UltraEpPlanner {
 public:
  // domain: the number of this block.
  static MOE_LB_DEVICE void Run(const T& t, const UltraEpCall& call, int domain) {
    const UltraEpLayout at = LayOut(call);
    EditedPlan<T, W> plan(t, call.plan, domain, at.plan);
    if (!plan.Load()) return;
    UltraEpPlanner planner(t, call, plan, at);
    planner.Sort();
    t.SyncBlock();
    planner.FindLimit();
    plan.Apply(planner.MovesOf(planner.kept_), planner.counts_[planner.kept_]);
    t.SyncBlock();
    plan.WritePlacement();
  }

 private:
  template <typename V>
  using Array = typename T::template Array<V>;

  static constexpr int kLadder = 3;
  static constexpr int kFailed = -1;

  MOE_LB_DEVICE UltraEpPlanner(const T& t, const UltraEpCall& call, const EditedPlan<T, W>& plan,
                               const UltraEpLayout& at)
      : t_(t), call_(call), plan_(plan), at_(at) {
    by_load_ = t.template Shared<uint16_t>(at.by_load, Size(plan.num_ranks));
    by_served_ = t.template Shared<uint16_t>(at.by_served, Size(plan.num_experts));
    counts_ = t.template Shared<int32_t>(at.counts, kLists);
  }

  MOE_LB_DEVICE Moves<T> MovesOf(int list) const {
    Moves<T> moves;
    moves.Place(t_, call_.plan, at_.moves + at_.one_moves * static_cast<size_t>(list));
    return moves;
  }

  MOE_LB_DEVICE void Sort() const {
    for (int rank = t_.thread(); rank < plan_.num_ranks; rank += kThreads) {
      const int32_t load = plan_.load[rank];
      int place = 0;
      for (int other = 0; other < plan_.num_ranks; ++other) {
        const int32_t its_load = plan_.load[other];
        place += its_load > load || (its_load == load && other < rank) ? 1 : 0;
      }
      by_load_[place] = static_cast<uint16_t>(rank);
    }
    plan_.SortByServed(by_served_);
    // The largest load needs no replica, so it is the first limit known to succeed.
    if (t_.thread() == 0) counts_[kept_] = 0;
  }

  // ---- The search for a limit ------------------------------------------------------

  // Sets `kept_` to the replicas of the limit found.
  MOE_LB_DEVICE void FindLimit() {
    int64_t sum = 0;
    int64_t high = 0;
    for (int rank = 0; rank < plan_.num_ranks; ++rank) {
      const int32_t load = plan_.load[rank];
      sum += load;
      high = Most<int64_t>(high, load);
    }
    int64_t low = (sum + plan_.num_ranks - 1) / plan_.num_ranks;
    if (TryAll(Ladder(low, high), kAttempts, kLadder) >= 0) return;
    while (low < high) {
      const int64_t width = high - low, base = low;
      const bool is_last = width <= kAttempts;
      const auto limit = [&](int attempt) { return is_last ? base + attempt : base + width * (attempt + 1) / 5; };
      const int first =
          TryAll(limit(Least(t_.warp(), kAttempts - 1)), is_last ? static_cast<int>(width) : kAttempts, 0);
      if (is_last) return;
      low = first == 0 ? low : limit(first < 0 ? kAttempts - 1 : first - 1) + 1;
      if (first >= 0) high = limit(first);
    }
  }

  // The limit of this warp in the first round: three with the dynamic floor, then the mean with the fixed one.
  MOE_LB_DEVICE int64_t Ladder(int64_t low, int64_t high) const {
    // float32, see ultraep.cc.
    const float first = ceilf(static_cast<float>(low) * (1.0f + call_.options.eps));
    int64_t limit = first >= static_cast<float>(high) ? high : Most(low, static_cast<int64_t>(first));
    for (int i = 0; i < t_.warp(); ++i) limit = Least(high, limit + Most<int64_t>(1, (high + 99) / 100));
    return t_.warp() < kLadder ? limit : low;
  }

  // Each of the first `number` warps attempts its limit, the first `dynamic` of them with the dynamic floor. Returns
  // the first that succeeds, whose replicas are kept, or -1.
  MOE_LB_DEVICE int TryAll(int64_t limit, int number, int dynamic) {
    if (t_.warp() < number) {
      const int list = ListOf(t_.warp());
      const int count = Attempt(static_cast<int32_t>(limit), t_.warp() < dynamic, MovesOf(list));
      if (t_.lane() == 0) counts_[list] = count;
    }
    t_.SyncBlock();
    int first = -1;
    for (int attempt = number - 1; attempt >= 0; --attempt) {
      if (static_cast<int32_t>(counts_[ListOf(attempt)]) != kFailed) first = attempt;
    }
    if (first >= 0) kept_ = ListOf(first);
    t_.SyncBlock();  // all have read
    return first;
  }

  MOE_LB_DEVICE int ListOf(int attempt) const { return (kept_ + 1 + attempt) % kLists; }

  // ---- An attempt, by one warp -----------------------------------------------------

  // Returns the number of replicas under a limit, or kFailed.
  MOE_LB_DEVICE int Attempt(int32_t limit, bool is_dynamic, const Moves<T>& moves) {
    plan_.CountEmpty(open_);
    for (int k = 0; k < W; ++k) {
      const int rank = kLanes * k + t_.lane();
      const int32_t load = rank < plan_.num_ranks ? static_cast<int32_t>(plan_.load[rank]) : limit;
      room_[k] = static_cast<uint32_t>(Most(limit - load, 0));
    }
    int count = 0;
    for (int i = 0; i < plan_.num_ranks; ++i) {
      const int donor = by_load_[i];
      const int32_t load = plan_.load[donor];
      if (load <= limit) break;
      if (!Give(donor, static_cast<uint32_t>(load - limit), is_dynamic, moves, &count)) return kFailed;
    }
    return count;
  }

  // `Domain::Give` of ultraep.cc.
  MOE_LB_DEVICE bool Give(int donor, uint32_t need, bool is_dynamic, const Moves<T>& moves, int* count) {
    for (int place = donor * plan_.home; place < (donor + 1) * plan_.home; ++place) {
      const int expert = by_served_[place];
      const auto served = static_cast<uint32_t>(plan_.served[expert]);
      // The home keeps one token, and the experts behind this one have no more.
      if (served <= 1) break;
      uint32_t left = served - 1;
      Ranks<W> holders;
      for (int k = 0; k < W; ++k) holders.words[k] = plan_.holders[expert * W + k];
      while (left > 0) {
        uint32_t amounts[size_t{W}];
        uint32_t candidates = 0;
        for (int k = 0; k < W; ++k) {
          amounts[k] = open_[k] > 0 && (holders.words[k] >> t_.lane() & 1) == 0 ? room_[k] : 0;
          candidates += static_cast<uint32_t>(NumBits(t_.Ballot(amounts[k] > 0)));
        }
        if (candidates == 0) break;
        const Peak taker = FindPeak<W>(t_, amounts);
        const uint32_t tokens = Least(Least(need, taker.amount), left);
        const auto floor = is_dynamic ? (need + candidates - 1) / candidates
                                      : static_cast<uint32_t>(Least<int64_t>(call_.options.min_tokens, INT32_MAX));
        if (tokens < floor) break;
        if (t_.lane() == 0) moves.Set(*count, expert, taker.rank, static_cast<int32_t>(tokens));
        ++*count;
        holders.Add(taker.rank);
        Take(taker.rank, tokens);
        left -= tokens;
        need -= tokens;
        if (need == 0) return true;
      }
    }
    return false;
  }

  MOE_LB_DEVICE void Take(int rank, uint32_t tokens) {
    for (int k = 0; k < W; ++k) {
      if (kLanes * k + t_.lane() != rank) continue;
      room_[k] -= tokens;
      --open_[k];
    }
  }

  const T& t_;
  const UltraEpCall& call_;
  const EditedPlan<T, W>& plan_;
  const UltraEpLayout& at_;
  Array<uint16_t> by_load_;    // [ranks], highest load first
  Array<uint16_t> by_served_;  // [experts]: those of each rank, most served first
  Array<int32_t> counts_;      // [lists], replicas, or kFailed
  int kept_ = kAttempts;       // the list of the lowest limit known to succeed
  uint32_t room_[size_t{W}];   // of the ranks of this lane, in an attempt
  int open_[size_t{W}];        // likewise, empty slots
};

}  // namespace moe_lb::device
