// `ExactDomains` of ffi/planning as one launch: a block of threads for each domain and limit, equal plans.
//
// Candidates of a plan are independent, so each has a warp and a flow: three rules for the lowest maximum load, and
// three for the fewest replicas under the limit of that load. The limit is not known until the first three are done.
// If the lowest maximum is the mean, as usual, it is the limit that the other three have assumed; else the maximum is
// lowered by further candidates, and they run again.
#pragma once

#include "ffi/planning/chain.h"
#include "ffi/planning/device/exact_call.h"
#include "ffi/planning/device/fill.h"
#include "ffi/planning/device/localize.h"
#include "ffi/planning/device/one_pass.h"
#include "ffi/planning/device/search.h"
#include "ffi/planning/device/thin.h"
#include "ffi/planning/device/varied_fill.h"

namespace moe_lb::device {

template <typename T, int W>
class ExactPlanner {
 public:
  static MOE_LB_DEVICE void Run(const T& t, const ExactCall& call, int block) {
    const int plan = block / call.domains();
    const ExactCall only = call.Only(plan, t.template Global<const int32_t>(call.limits, Size(call.plans))[plan]);
    ExactPlanner planner(t, only, block % call.domains());
    if (!planner.Load()) return;
    planner.Plan();
    planner.Write();
  }

 private:
  template <typename V>
  using Array = typename T::template Array<V>;

  static constexpr int kHalf = kCandidates / 2;
  static constexpr int kNone = INT32_MAX;

  MOE_LB_DEVICE ExactPlanner(const T& t, const ExactCall& call, int domain)
      : t_(t),
        call_(call),
        at_(LayOut(call)),
        first_rank_(domain * call.shape.num_ranks),
        first_expert_(domain * call.shape.num_experts) {
    const size_t ranks = Size(call.shape.num_ranks), experts = Size(call.shape.num_experts);
    sums_ = t.template Shared<uint64_t>(at_.sums, kWarps);
    loads_ = t.template Shared<int32_t>(at_.results, kCandidates);
    left_ = t.template Shared<int32_t>(at_.results + 4 * kCandidates, kCandidates);
    entries_ = t.template Shared<int32_t>(at_.results + 8 * kCandidates, kCandidates);
    fan_out_ = t.template Shared<int32_t>(at_.results + 12 * kCandidates, kCandidates);
    chosen_ = t.template Shared<int32_t>(at_.results + 16 * kCandidates, 2);
    home_.tokens = t.template Shared<int32_t>(at_.tokens, experts);
    home_.load = t.template Shared<int32_t>(at_.load, ranks);
    home_.hottest = t.template Shared<uint16_t>(at_.hottest, ranks);
    replicas_.Place(t, call.shape, at_.replicas);
  }

  // ---- Input -----------------------------------------------------------------------

  // Sums up the counts of each expert and empties the results. False: the counts are refused.
  MOE_LB_DEVICE bool Load() {
    const auto counts = t_.template Global<const int32_t>(call_.counts, call_.all_amounts());
    const Shape& shape = call_.shape;
    const auto own_counts = t_.template Shared<int32_t>(at_.counts, shape.all_amounts());
    uint64_t sum = 0;
    bool negative = false;
    for (int expert = t_.thread(); expert < call_.all_experts; expert += kThreads) {
      const int own = expert - first_expert_;
      const bool is_own = own >= 0 && own < shape.num_experts;
      uint32_t tokens = 0;
      for (int rank = 0; rank < call_.all_ranks; ++rank) {
        const int32_t count = counts[rank * call_.all_experts + expert];
        sum += static_cast<uint32_t>(count);
        negative = negative || count < 0;
        tokens += static_cast<uint32_t>(count);
        const int own_rank = rank - first_rank_;
        if (call_.keeps_counts && is_own && own_rank >= 0 && own_rank < shape.num_ranks) {
          own_counts[own_rank * shape.num_experts + own] = count;
        }
      }
      if (is_own) home_.tokens[own] = static_cast<int32_t>(tokens);
    }
    Clear();
    sum = SumOfBlock(t_, sums_, negative ? kTooManyTokens : sum);
    const bool good = sum <= INT32_MAX;
    if (first_rank_ == 0 && t_.thread() == 0) t_.template Global<int32_t>(call_.status, 1)[0] = good ? 0 : 1;
    if (good) AddUp();
    t_.SyncBlock();
    return good;
  }

  MOE_LB_DEVICE void Clear() const {
    const auto placement = t_.template Global<int32_t>(call_.placement, Size(call_.all_ranks * call_.all_slots));
    const auto quota = t_.template Global<int32_t>(call_.quota, call_.all_amounts());
    const int slots = call_.shape.num_ranks * call_.all_slots, amounts = call_.shape.num_experts * call_.all_ranks;
    for (int i = t_.thread(); i < slots; i += kThreads) placement[first_rank_ * call_.all_slots + i] = -1;
    for (int i = t_.thread(); i < amounts; i += kThreads) quota[first_expert_ * call_.all_ranks + i] = 0;
  }

  MOE_LB_DEVICE void AddUp() {
    for (int rank = t_.thread(); rank < call_.shape.num_ranks; rank += kThreads) {
      const int first = rank * call_.shape.home;
      int32_t load = 0, most = -1;
      int hottest = first;
      for (int expert = first; expert < first + call_.shape.home; ++expert) {
        const int32_t tokens = home_.tokens[expert];
        load += tokens;
        if (tokens > most) hottest = expert;
        most = Most(most, tokens);
      }
      home_.load[rank] = load;
      home_.hottest[rank] = static_cast<uint16_t>(hottest);
    }
  }

  // ---- Plan: all threads keep the same state ---------------------------------------

  MOE_LB_DEVICE void Plan() {
    int32_t most = 0, sum = 0;
    for (int rank = t_.lane(); rank < call_.shape.num_ranks; rank += kLanes) {
      const int32_t load = home_.load[rank];
      most = Most(most, load);
      sum += load;
    }
    home_max_ = static_cast<int32_t>(t_.Max(static_cast<uint32_t>(most)));
    total_ = static_cast<int32_t>(t_.Sum(static_cast<uint32_t>(sum)));
    mean_ = total_ / call_.shape.num_ranks + (total_ % call_.shape.num_ranks != 0 ? 1 : 0);
    enough_ = mean_ + mean_ / kCloseEnough;
    if (call_.brief) enough_ = Most(enough_, LimitOf(mean_));
    limit_ = LimitOf(mean_);
    max_load_ = home_max_;
    if (call_.shape.slots == 0 || call_.fan_out == 0) return;
    // One loop for all steps: what it calls is inlined once, or compilers of device code take minutes.
    for (Step step = Step::kRules;; step = NextOf(step)) {
      RunCandidate(step);
      t_.SyncBlock();
      if (step == Step::kFewest) break;
      Choose(step);
      t_.SyncBlock();  // all have read
    }
    LevelFewest();
    t_.SyncBlock();
    if (t_.warp() == 0) Finish();
    t_.SyncBlock();
  }

  MOE_LB_DEVICE Flow<T, W> FlowOf(int number) const {
    Flow<T, W> flow;
    flow.Place(t_, call_.shape, at_.flows + at_.flow * static_cast<size_t>(number));
    return flow;
  }

  // The limit of the second step: see Planner::Plan in exact.cc.
  MOE_LB_DEVICE int32_t LimitOf(int32_t max_load) const {
    const double extra = Least(call_.eps * max_load, static_cast<double>(total_ - max_load));
    return max_load + static_cast<int32_t>(extra);
  }

  static MOE_LB_DEVICE DonorRule RuleOf(int candidate) {
    if (candidate % kHalf == 0) return DonorRule::kSurplus;
    if (candidate % kHalf == 1) return DonorRule::kUseful;
    return candidate < kHalf ? DonorRule::kHottest : DonorRule::kSequential;
  }

  // ---- Candidates ------------------------------------------------------------------

  // Steps of `Planner::Plan`. kRules also tries the fewest replicas under an assumed limit; kFewest thins the best, and
  // tries again under the limit found if it is another.
  enum class Step { kRules, kOnePass, kNarrow, kVary, kSearch, kFewest };

  MOE_LB_DEVICE bool IsFewest(Step step) const {
    return t_.warp() >= kHalf && (step == Step::kRules || step == Step::kFewest);
  }

  // Whether this warp has a candidate.
  MOE_LB_DEVICE bool HasCandidate(Step step) const {
    const int warp = t_.warp();
    if (IsFewest(step)) return warp < kCandidates && call_.eps > 0 && (step == Step::kRules || is_lowered_);
    // The plan at home may be good enough.
    return warp < CandidatesOf(step) && (step != Step::kRules || home_max_ > enough_);
  }

  static MOE_LB_DEVICE int CandidatesOf(Step step) {
    if (step == Step::kOnePass) return 2;
    return step == Step::kSearch || step == Step::kFewest ? 1 : kHalf;
  }

  // The flow of a candidate. The best may be in one of the latter three, whose candidate then has the first.
  MOE_LB_DEVICE int NumberOf(Step step, int candidate) const {
    if (step == Step::kRules) return candidate;
    if (step == Step::kFewest) return candidate == 0 ? Most(best_, 0) : candidate == best_ ? 0 : candidate;
    return best_ >= 0 && candidate >= best_ ? candidate + 1 : candidate;
  }

  // Every warp fills, levels and thins the flow of its candidate.
  MOE_LB_DEVICE void RunCandidate(Step step) {
    if (!HasCandidate(step)) return;
    const bool is_fewest = IsFewest(step), is_best = step == Step::kFewest && !is_fewest;
    const int candidate = t_.warp(), number = NumberOf(step, candidate);
    Flow<T, W> flow = FlowOf(number);
    FillCandidate(step, flow);
    int32_t load = max_load_;
    if (!is_best) load = flow.Level(t_, is_fewest ? limit_ : mean_, is_fewest ? INT32_MAX : max_load_);
    int left = kNone;
    if (is_best || is_fewest) {
      // A chain may run out of slots and exceed the limit.
      const int memory = is_fewest ? candidate - kHalf + 1 : 0;
      Thin<T, W> thin(t_, flow, at_.thin + at_.one_thin * static_cast<size_t>(memory));
      if (load <= limit_) left = thin.Run(limit_);
    }
    if (t_.lane() != 0) return;
    loads_[candidate] = load;
    left_[candidate] = left;
    entries_[number] = flow.num_entries;
  }

  MOE_LB_DEVICE void FillCandidate(Step step, Flow<T, W>& flow) {
    if (step == Step::kOnePass) {
      if (t_.warp() == 0) OnePass<T, W>::Greedy(t_, flow, home_, mean_, call_.fan_out);
      if (t_.warp() == 1) OnePass<T, W>::UltraEp(t_, flow, home_, mean_, home_max_, call_.fan_out);
    } else if (step == Step::kVary) {
      const Variation variation(static_cast<uint32_t>(round_ * kVariedAtOnce + t_.warp()));
      VariedFill<T, W>::Run(t_, flow, home_, variation.Limit(max_load_, mean_), variation, call_.fan_out);
    } else if (step == Step::kSearch) {
      SearchFurther(flow);
    } else if (step == Step::kFewest && t_.warp() == 0) {
      if (best_ < 0) flow.Reset(t_, home_.tokens, home_.load);
      if (best_ >= 0) flow.num_entries = entries_[best_];
    } else {
      Fill<T, W>::Run(t_, flow, home_,
                      IsFewest(step)          ? limit_
                      : step == Step::kNarrow ? tried_
                                              : mean_,
                      RuleOf(t_.warp()), call_.fan_out);
    }
  }

  // As if one after the other, the candidates become the best if they lower the maximum, until it is low enough.
  MOE_LB_DEVICE void Choose(Step step) {
    const int32_t enough = step == Step::kRules ? enough_ : step == Step::kNarrow ? tried_ : 0;
    before_ = max_load_;
    int best = best_;
    for (int candidate = 0; candidate < CandidatesOf(step) && max_load_ > enough; ++candidate) {
      const int32_t load = loads_[candidate];
      if (load >= max_load_) continue;
      max_load_ = load;
      best = NumberOf(step, candidate);
    }
    best_ = best;
  }

  // The order of `Planner::FindBest`.
  MOE_LB_DEVICE Step NextOf(Step step) {
    static_assert(kVariedAtOnce == kHalf);
    if (step == Step::kRules && max_load_ != mean_) {
      is_lowered_ = true;
      if (!call_.brief) return Step::kOnePass;
      if (max_load_ > enough_) return Step::kSearch;
    }
    if (step == Step::kOnePass) low_ = mean_;
    if (step == Step::kNarrow && max_load_ > tried_) low_ = tried_;
    if (step == Step::kNarrow || step == Step::kVary) ++round_;
    if (step == Step::kOnePass || step == Step::kNarrow) {
      tried_ = low_ + (max_load_ - low_) / 2;
      if (round_ < kLimitRounds && max_load_ > enough_ && max_load_ - low_ > enough_ - mean_) return Step::kNarrow;
      round_ = 0;
    }
    if (step == Step::kVary) in_vain_ = max_load_ < before_ ? 0 : in_vain_ + 1;
    const VariedRounds rounds(call_.shape.all_slots());
    const bool is_above = step != Step::kRules && step != Step::kSearch && max_load_ > enough_;
    if (is_above && round_ < rounds.number && in_vain_ < rounds.patience) return Step::kVary;
    limit_ = LimitOf(max_load_);
    return is_above ? Step::kSearch : Step::kFewest;
  }

  // Fills a flow with the replicas found, without tokens.
  MOE_LB_DEVICE void SearchFurther(Flow<T, W>& flow) const {
    Flow<T, W> start = FlowOf(Most(best_, 0));
    start.num_entries = best_ < 0 ? 0 : static_cast<int>(entries_[best_]);
    SearchMemory<T, W> memory;
    memory.Place(t_, call_.shape, at_.search);
    Searcher<T, W> searcher(t_, flow.shape, memory, call_.fan_out);
    // As in exact.cc.
    int shift = 0;
    if (W == 1 && call_.shape.num_ranks <= static_cast<int>(SubsetEvaluator::kMaxRanks)) {
      while ((total_ >> shift) > SubsetEvaluator::kMaxTokens) ++shift;
      searcher.Start(home_.tokens, shift);
      Subsets<T, W> evaluator(t_, flow, memory.tokens, memory.holders);
      searcher.Run(evaluator, start, enough_ >> shift, SubsetEffort(call_.brief));
    } else {
      searcher.Start(home_.tokens, shift);
      flow.Reset(t_, home_.tokens, home_.load);
      FlowSwaps<T, W> evaluator(t_, flow, mean_);
      searcher.Run(evaluator, start, enough_, FlowEffort(call_.shape.num_ranks, call_.brief));
    }
    t_.SyncWarp();  // the best is written, and all have read the flow
    flow.Reset(t_, home_.tokens, home_.load);
    t_.SyncWarp();
    for (int slot = 0; slot < call_.shape.all_slots(); ++slot) {
      const int expert = memory.best[slot];
      if (expert == kNoExpert) continue;
      if (t_.lane() == 0) flow.Append(expert, flow.RankOf(slot), 0);
      ++flow.num_entries;
    }
    t_.SyncWarp();
  }

  // Whether a candidate has the fewest replicas: the best, or one under the limit if this is above the maximum.
  MOE_LB_DEVICE bool HasFewest(int candidate) const {
    const bool may_be_fewer = call_.eps > 0 && limit_ > max_load_;
    int fewest = left_[0];
    for (int other = kHalf; other < kCandidates && may_be_fewer; ++other) {
      fewest = Least(fewest, static_cast<int>(left_[other]));
    }
    const bool is_one = candidate == 0 || (may_be_fewer && candidate >= kHalf && candidate < kCandidates);
    return is_one && left_[candidate] == fewest;
  }

  MOE_LB_DEVICE Flow<T, W> FewestOf(int candidate) const {
    const int number = NumberOf(Step::kFewest, candidate);
    Flow<T, W> flow = FlowOf(number);
    flow.num_entries = entries_[number];
    return flow;
  }

  // Every warp with a plan of the fewest replicas levels it again.
  MOE_LB_DEVICE void LevelFewest() {
    const int candidate = t_.warp();
    if (!HasFewest(candidate)) return;
    Flow<T, W> flow = FewestOf(candidate);
    const int32_t load = flow.Level(t_, mean_);
    const int fan_out = flow.FanOut(t_);
    if (t_.lane() != 0) return;
    loads_[candidate] = load;
    fan_out_[candidate] = fan_out;
  }

  // Of these, takes the one with the lowest maximum, then with the fewest replicas of one rank, and localizes it.
  MOE_LB_DEVICE void Finish() {
    int best = -1;
    for (int candidate = 0; candidate < kCandidates; ++candidate) {
      if (!HasFewest(candidate)) continue;
      const int32_t load = loads_[candidate], fan_out = fan_out_[candidate];
      const int32_t lowest = best < 0 ? INT32_MAX : loads_[best];
      if (load < lowest || (load == lowest && fan_out < static_cast<int32_t>(fan_out_[best]))) best = candidate;
    }
    Flow<T, W> flow = FewestOf(best);
    limit_ = loads_[best];
    replicas_.List(t_, flow);
    t_.SyncWarp();
    if (call_.localize) {
      const int stride = call_.keeps_counts ? call_.shape.num_experts : call_.all_experts;
      Localize(flow, stride);
    }
    if (t_.lane() != 0) return;
    chosen_[0] = NumberOf(Step::kFewest, best);
    chosen_[1] = replicas_.count;
  }

  MOE_LB_DEVICE void Localize(Flow<T, W>& flow, int stride) {
    if (call_.keeps_counts) {
      const Starts<T> starts = {t_.template Shared<const int32_t>(at_.counts, call_.shape.all_amounts()), stride};
      Localizer<T, W>(t_, flow, replicas_, starts, limit_).Run();
    } else {
      const int first = first_rank_ * call_.all_experts + first_expert_;
      const auto counts = t_.template Global<const int32_t>(call_.counts + first, call_.all_amounts() - Size(first));
      const Starts<T> starts = {counts, stride};
      Localizer<T, W>(t_, flow, replicas_, starts, limit_).Run();
    }
  }

  // ---- Output ----------------------------------------------------------------------

  MOE_LB_DEVICE void Write() const {
    const bool has_replicas = call_.shape.slots > 0 && call_.fan_out > 0;
    const auto placement = t_.template Global<int32_t>(call_.placement, Size(call_.all_ranks * call_.all_slots));
    const auto quota = t_.template Global<int32_t>(call_.quota, call_.all_amounts());
    Flow<T, W> flow;
    if (has_replicas) flow = FlowOf(chosen_[0]);
    const int count = has_replicas ? static_cast<int>(chosen_[1]) : 0;
    for (int expert = t_.thread(); expert < call_.shape.num_experts; expert += kThreads) {
      const int rank = first_rank_ + expert / call_.shape.home, number = first_expert_ + expert;
      const int32_t tokens = has_replicas ? flow.tokens[expert] : home_.tokens[expert];
      placement[rank * call_.all_slots + expert % call_.shape.home] = number;
      quota[number * call_.all_ranks + rank] = tokens;
    }
    for (int i = t_.thread(); i < count; i += kThreads) {
      const int number = first_expert_ + static_cast<int>(replicas_.expert[i]);
      quota[number * call_.all_ranks + first_rank_ + static_cast<int>(replicas_.rank[i])] = replicas_.tokens[i];
    }
    for (int rank = t_.thread(); rank < call_.shape.num_ranks; rank += kThreads) {
      int place = (first_rank_ + rank) * call_.all_slots + call_.shape.home;
      for (int i = 0; i < count; ++i) {
        if (static_cast<int>(replicas_.rank[i]) != rank) continue;
        placement[place++] = first_expert_ + static_cast<int>(replicas_.expert[i]);
      }
    }
  }

  const T& t_;
  const ExactCall& call_;
  const ExactLayout at_;
  const int first_rank_, first_expert_;
  Array<uint64_t> sums_;    // [warps], tokens
  Array<int32_t> loads_;    // [candidates], maximum load; in the end, of those with the fewest replicas
  Array<int32_t> left_;     // [candidates], replicas left; [0]: of the best
  Array<int32_t> fan_out_;  // [candidates], of these: replicas of the experts of one home rank, at most
  Array<int32_t> entries_;  // [flows], replicas added
  Array<int32_t> chosen_;   // number of the flow, and replicas of the plan
  HomeTokens<T> home_;
  Replicas<T> replicas_;
  int32_t home_max_ = 0, total_ = 0, mean_ = 0, enough_ = 0;
  int32_t limit_ = 0;
  int32_t max_load_ = 0;
  int best_ = -1;            // number of the flow with the maximum load; -1: the plan at home
  bool is_lowered_ = false;  // by the steps after the rules
  // Of these steps: the round of a step, rounds without a lower maximum, the maximum before the last candidates, and
  // the lower end of the range of limits and the limit tried.
  int round_ = 0, in_vain_ = 0;
  int32_t before_ = 0, low_ = 0, tried_ = 0;
};

}  // namespace moe_lb::device
