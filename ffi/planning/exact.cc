#include "ffi/planning/exact.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "ffi/planning/chain.h"
#include "ffi/planning/checks.h"
#include "ffi/planning/flow_evaluator.h"
#include "ffi/planning/localize.h"
#include "ffi/planning/one_pass.h"
#include "ffi/planning/search.h"
#include "ffi/planning/serving.h"
#include "ffi/planning/subset_evaluator.h"
#include "ffi/planning/thinning.h"
#include "ffi/planning/varied_chain.h"

namespace moe_lb {
namespace {

// Visits the counts in memory order and without a branch, because they are the largest operand and almost always valid.
// After a failure, CheckCounts finds the invalid entry.
bool FineCounts(View<const int32_t> tokens, MatrixView<const int32_t> counts) {
  std::vector<int64_t> left(tokens.begin(), tokens.end());
  int32_t signs = 0;
  for (size_t rank = 0; rank < counts.rows(); ++rank) {
    const View<const int32_t> row = counts[rank];
    for (size_t expert = 0; expert < row.size(); ++expert) {
      signs |= row[expert];
      left[expert] -= row[expert];
    }
  }
  return signs >= 0 && *std::min_element(left.begin(), left.end()) >= 0;
}

Status CheckCounts(View<const int32_t> tokens, MatrixView<const int32_t> counts, size_t num_ranks) {
  if (counts.rows() == 0) return Ok();
  if (Status bad = CheckShape("counts", counts, num_ranks, tokens.size())) return bad;
  if (FineCounts(tokens, counts)) return Ok();
  for (size_t expert = 0; expert < tokens.size(); ++expert) {
    int64_t sum = 0;
    for (size_t rank = 0; rank < num_ranks; ++rank) {
      const int64_t count = counts[rank][expert];
      if (count < 0)
        return Refuse("counts of rank ", rank, ", expert ", expert, " is ", count, "; expected at least 0");
      sum += count;
    }
    if (sum > tokens[expert]) {
      return Refuse("counts of expert ", expert, " sum to ", sum, "; expected at most its ", tokens[expert], " tokens");
    }
  }
  return Ok();
}

Status Check(View<const int32_t> tokens, const ExactOptions& options, MatrixView<int32_t> placement,
             MatrixView<int32_t> quota) {
  const size_t num_experts = tokens.size();
  const size_t num_ranks = placement.rows();
  if (num_ranks < 1 || num_experts < 1 || num_experts % num_ranks != 0) {
    return Refuse("tokens has ", num_experts, " experts; expected a positive multiple of the ", num_ranks, " ranks");
  }
  const size_t slots = placement.columns();
  if (slots < num_experts / num_ranks || slots > num_experts) {
    return Refuse("placement has ", slots, " slots per rank; expected ", num_experts / num_ranks,
                  ", the home experts, to ", num_experts, ", all experts");
  }
  if (Status bad = CheckShape("quota", quota, num_experts, num_ranks)) return bad;
  if (Status bad = CheckOptions(options)) return bad;
  if (Status bad = CheckTokens(tokens)) return bad;
  return options.counts_are_checked ? Ok() : CheckCounts(tokens, options.counts, num_ranks);
}

constexpr int32_t kNotLevelled = -1;
constexpr DonorRule kRules[] = {DonorRule::kSurplus, DonorRule::kUseful, DonorRule::kHottest};

class Planner {
 public:
  Planner(View<const int32_t> tokens, size_t num_ranks, size_t slots, const ExactOptions& options)
      : tokens_(tokens),
        total_(std::accumulate(tokens.begin(), tokens.end(), 0)),
        slots_(slots),
        fan_out_(static_cast<size_t>(options.max_fan_out)),
        eps_(options.eps),
        brief_(options.brief),
        chain_(num_ranks, slots, fan_out_),
        best_(tokens, num_ranks),
        now_(tokens, num_ranks) {}

  const Serving& Plan(const ExactOptions& options) {
    max_load_ = best_.MaxLoad();
    // Without replicas, all tokens are served at home.
    if (slots_ == 0 || fan_out_ == 0) return best_;
    FindBest();
    const int32_t limit = LimitOf(max_load_);
    thinning_.Thin(best_, limit);
    if (limit > max_load_) FindFewest(limit);
    const int32_t lowest = Lowest();
    // Localize last: a moved replica can be neither levelled nor removed.
    if (options.counts.rows() > 0) Localize(best_, options.counts, lowest, slots_);
    return best_;
  }

 private:
  void FindBest() {
    const auto ranks = static_cast<int32_t>(best_.num_ranks());
    // A plan at the mean, rounded up, is optimal.
    mean_ = total_ / ranks + (total_ % ranks != 0);
    // A result this close to the mean does not justify the time of further steps.
    enough_ = mean_ + mean_ / kCloseEnough;
    if (brief_) enough_ = std::max(enough_, LimitOf(mean_));
    for (const DonorRule rule : kRules) {
      if (max_load_ <= enough_) break;
      chain_.Fill(now_, mean_, rule);
      KeepIfBetter();
    }
    if (max_load_ == mean_) return;
    if (!brief_) LowerFurther();
    if (max_load_ > enough_ && ranks <= kMaxSearchedRanks) SearchFurther();
  }

  // The maximum that `eps` allows. One above the sum of all tokens is never useful; bounded by it, it fits int32.
  int32_t LimitOf(int32_t max_load) const {
    return max_load + static_cast<int32_t>(std::min(eps_ * max_load, static_cast<double>(total_ - max_load)));
  }

  void LowerFurther() {
    StartFromOnePass();
    NarrowLimit();
    Vary();
  }

  void StartFromOnePass() {
    OnePass one_pass(best_.num_ranks(), slots_, fan_out_);
    one_pass.FillGreedy(now_, mean_);
    KeepIfBetter();
    one_pass.FillUltraEp(now_, mean_);
    KeepIfBetter();
  }

  // Halves the range of limits for the chains. Under a limit out of reach they spend the slots on few ranks. They may
  // fail under a limit and keep a lower one, so the range is not a bound.
  void NarrowLimit() {
    int32_t low = mean_;
    for (int round = 0; round < kLimitRounds && max_load_ > enough_ && max_load_ - low > enough_ - mean_; ++round) {
      const int32_t limit = low + (max_load_ - low) / 2;
      for (const DonorRule rule : kRules) {
        chain_.Fill(now_, limit, rule);
        KeepIfBetter();
        if (max_load_ <= limit) break;
      }
      if (max_load_ > limit) low = limit;
    }
  }

  // Tries chains in varied orders, under lower limits.
  void Vary() {
    VariedChain varied(best_.num_ranks(), slots_, fan_out_);
    const VariedRounds rounds(static_cast<int64_t>(best_.num_ranks() * slots_));
    int in_vain = 0;
    for (int round = 0; round < rounds.number && in_vain < rounds.patience && max_load_ > enough_; ++round) {
      const int32_t before = max_load_;
      for (int i = 0; i < kVariedAtOnce; ++i) {
        const Variation variation(static_cast<uint32_t>(round * kVariedAtOnce + i));
        varied.Fill(now_, variation.Limit(before, mean_), variation);
        KeepIfBetter();
      }
      in_vain = max_load_ < before ? 0 : in_vain + 1;
    }
  }

  void SearchFurther() {
    const std::vector<Replica> found = SearchFor();
    now_.Reset();
    // The search returns positions of replicas without tokens. Level pushes tokens to them.
    for (const Replica& replica : found) now_.Add(replica.expert, replica.rank, 0);
    KeepIfBetter();
  }

  void KeepIfBetter() {
    const int32_t load = now_.Level(mean_, max_load_);
    if (load >= max_load_) return;
    max_load_ = load;
    // No copy is needed: the next use of `now_` starts with a reset.
    std::swap(best_, now_);
  }

  std::vector<Replica> SearchFor() const {
    const size_t num_ranks = best_.num_ranks();
    if (num_ranks <= SubsetEvaluator::kMaxRanks) return SearchSubsets();
    if (num_ranks <= RankSet<1>::kMaxRanks) return SearchFlows<1>();
    if (num_ranks <= RankSet<2>::kMaxRanks) return SearchFlows<2>();
    return num_ranks <= RankSet<4>::kMaxRanks ? SearchFlows<4>() : SearchFlows<kMaxSearchedRanks / 64>();
  }

  template <size_t W>
  std::vector<Replica> SearchFlows() const {
    const size_t num_ranks = best_.num_ranks();
    FlowEvaluator<W> evaluator(tokens_, num_ranks, slots_);
    return Search<W>(tokens_, num_ranks, slots_, fan_out_, evaluator)
        .Run(best_.Replicas(), enough_, FlowEffort(static_cast<int64_t>(num_ranks), brief_));
  }

  std::vector<Replica> SearchSubsets() const {
    const size_t num_ranks = best_.num_ranks();
    // SubsetEvaluator adds up tokens in 32 bits for many sets, so larger loads are halved until they fit. The search
    // may then choose a worse placement, but the quotas stay exact: KeepIfBetter levels with exact tokens.
    int shift = 0;
    while ((total_ >> shift) > SubsetEvaluator::kMaxTokens) ++shift;
    std::vector<int32_t> coarse(tokens_.begin(), tokens_.end());
    for (int32_t& tokens : coarse) tokens >>= shift;
    const View<const int32_t> view(coarse.data(), coarse.size());
    SubsetEvaluator evaluator(view, num_ranks);
    return Search<1>(view, num_ranks, slots_, fan_out_, evaluator)
        .Run(best_.Replicas(), enough_ >> shift, SubsetEffort(brief_));
  }

  void FindFewest(int32_t limit) {
    for (const DonorRule rule : {DonorRule::kSurplus, DonorRule::kUseful, DonorRule::kSequential}) {
      chain_.Fill(now_, limit, rule);
      // Some rules exceed the limit, because a chain may run out of slots.
      if (now_.Level(limit) > limit) continue;
      thinning_.Thin(now_, limit);
      if (now_.num_replicas() > best_.num_replicas()) continue;
      // Levelled only if needed: it takes as long as a chain.
      int32_t load = kNotLevelled;
      if (now_.num_replicas() == best_.num_replicas()) {
        load = now_.Level(mean_);
        const int32_t lowest = Lowest();
        if (load > lowest || (load == lowest && now_.FanOut() >= best_.FanOut())) continue;
      }
      lowest_ = load;
      std::swap(best_, now_);
    }
  }

  // Levels the thinned plan again, once: the replicas left may keep a lower limit. Every one of them still serves
  // tokens: without it, even the limit of the removals is out of reach.
  int32_t Lowest() {
    if (lowest_ == kNotLevelled) lowest_ = best_.Level(mean_);
    return lowest_;
  }

  View<const int32_t> tokens_;
  int32_t total_;
  size_t slots_;  // of replicas, per rank
  size_t fan_out_;
  double eps_;
  bool brief_;
  Chain chain_;
  Thinning thinning_;
  Serving best_;
  Serving now_;
  int32_t max_load_ = 0;           // of best_
  int32_t lowest_ = kNotLevelled;  // of best_ after its thinning
  int32_t mean_ = 0;               // load, rounded up
  int32_t enough_ = 0;
};

void Write(const Serving& plan, MatrixView<int32_t> placement, MatrixView<int32_t> quota) {
  std::fill(placement.flat().begin(), placement.flat().end(), -1);
  std::fill(quota.flat().begin(), quota.flat().end(), 0);
  std::vector<size_t> used(placement.rows(), 0);
  // The first entries are the experts at their homes in order, so home slots come first on every rank.
  for (uint32_t entry = 0; entry < plan.num_entries(); ++entry) {
    if (plan.removed(entry)) continue;
    const uint32_t rank = plan.rank(entry);
    placement[rank][used[rank]++] = static_cast<int32_t>(plan.expert(entry));
    quota[plan.expert(entry)][rank] = plan.tokens(entry);
  }
}

}  // namespace

Status CheckOptions(const ExactOptions& options) {
  // A NaN fails the comparison, so it is refused too.
  if (!(options.eps >= 0) || std::isinf(options.eps)) {
    return Refuse("eps is ", options.eps, "; expected a finite number, at least 0");
  }
  if (options.max_fan_out < 0) return Refuse("max_fan_out is ", options.max_fan_out, "; expected at least 0");
  return Ok();
}

Status Exact(View<const int32_t> tokens, const ExactOptions& options, MatrixView<int32_t> placement,
             MatrixView<int32_t> quota) {
  if (Status bad = Check(tokens, options, placement, quota)) return bad;
  const size_t slots = placement.columns() - tokens.size() / placement.rows();
  Planner planner(tokens, placement.rows(), slots, options);
  Write(planner.Plan(options), placement, quota);
  return Ok();
}

}  // namespace moe_lb
