#include "ffi/planning/exact.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "ffi/planning/chain.h"
#include "ffi/planning/checks.h"
#include "ffi/planning/flow_evaluator.h"
#include "ffi/planning/localize.h"
#include "ffi/planning/search.h"
#include "ffi/planning/serving.h"
#include "ffi/planning/subset_evaluator.h"
#include "ffi/planning/thinning.h"

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
  // A NaN fails the comparison, so it is refused too.
  if (!(options.eps >= 0) || std::isinf(options.eps)) {
    return Refuse("eps is ", options.eps, "; expected a finite number, at least 0");
  }
  if (options.max_fan_out < 0) return Refuse("max_fan_out is ", options.max_fan_out, "; expected at least 0");
  if (Status bad = CheckTokens(tokens)) return bad;
  return options.counts_are_checked ? Ok() : CheckCounts(tokens, options.counts, num_ranks);
}

class Planner {
 public:
  Planner(View<const int32_t> tokens, size_t num_ranks, size_t slots, const ExactOptions& options)
      : tokens_(tokens),
        total_(std::accumulate(tokens.begin(), tokens.end(), 0)),
        slots_(slots),
        fan_out_(static_cast<size_t>(options.max_fan_out)),
        chain_(num_ranks, slots, fan_out_),
        best_(tokens, num_ranks),
        now_(tokens, num_ranks) {}

  const Serving& Plan(const ExactOptions& options) {
    max_load_ = best_.MaxLoad();
    // Without replicas, all tokens are served at home.
    if (slots_ == 0 || fan_out_ == 0) return best_;
    FindBest();
    // A limit above the sum of all tokens is never useful. With this bound the limit fits int32 for every eps.
    const double extra = std::min(options.eps * max_load_, static_cast<double>(total_ - max_load_));
    const int32_t limit = max_load_ + static_cast<int32_t>(extra);
    thinning_.Thin(best_, limit);
    if (limit > max_load_) FindFewest(limit);
    // Localize last: a moved replica can be neither levelled nor removed.
    if (options.counts.rows() > 0) Localize(best_, options.counts, limit, slots_);
    return best_;
  }

 private:
  void FindBest() {
    const auto ranks = static_cast<int32_t>(best_.num_ranks());
    // A plan at the mean, rounded up, is optimal.
    const int32_t mean = total_ / ranks + (total_ % ranks != 0);
    const int32_t enough = mean + mean / kCloseEnough;
    for (const DonorRule rule : {DonorRule::kSurplus, DonorRule::kUseful, DonorRule::kHottest}) {
      // A result this close to the mean does not justify the time of the other rules.
      if (max_load_ <= enough) return;
      chain_.Fill(now_, mean, rule);
      KeepIfBetter(mean);
    }
    if (max_load_ <= enough || best_.num_ranks() > FlowEvaluator::kMaxRanks) return;
    now_.Reset();
    // The search returns positions of replicas without tokens. Level pushes tokens to them.
    for (const Replica& replica : SearchFor(enough)) now_.Add(replica.expert, replica.rank, 0);
    KeepIfBetter(mean);
  }

  void KeepIfBetter(int32_t mean) {
    const int32_t load = now_.Level(mean);
    if (load >= max_load_) return;
    max_load_ = load;
    // No copy is needed: the next use of `now_` starts with a reset.
    std::swap(best_, now_);
  }

  std::vector<Replica> SearchFor(int32_t enough) const {
    const size_t num_ranks = best_.num_ranks();
    if (num_ranks > SubsetEvaluator::kMaxRanks) {
      FlowEvaluator evaluator(tokens_, num_ranks, slots_);
      return Search(tokens_, num_ranks, slots_, fan_out_, evaluator).Run(best_.Replicas(), enough, kFlowEffort);
    }
    // SubsetEvaluator adds up tokens in 32 bits for many sets, so larger loads are halved until they fit. The search
    // may then choose a worse placement, but the quotas stay exact: KeepIfBetter levels with exact tokens.
    int shift = 0;
    while ((total_ >> shift) > SubsetEvaluator::kMaxTokens) ++shift;
    std::vector<int32_t> coarse(tokens_.begin(), tokens_.end());
    for (int32_t& tokens : coarse) tokens >>= shift;
    const View<const int32_t> view(coarse.data(), coarse.size());
    SubsetEvaluator evaluator(view, num_ranks);
    return Search(view, num_ranks, slots_, fan_out_, evaluator).Run(best_.Replicas(), enough >> shift, kSubsetEffort);
  }

  void FindFewest(int32_t limit) {
    for (const DonorRule rule : {DonorRule::kSurplus, DonorRule::kUseful, DonorRule::kSequential}) {
      chain_.Fill(now_, limit, rule);
      // Some rules exceed the limit, because a chain may run out of slots.
      if (now_.Level(limit) > limit) continue;
      thinning_.Thin(now_, limit);
      if (now_.num_replicas() < best_.num_replicas()) std::swap(best_, now_);
    }
  }

  View<const int32_t> tokens_;
  int32_t total_;
  size_t slots_;  // of replicas, per rank
  size_t fan_out_;
  Chain chain_;
  Thinning thinning_;
  Serving best_;
  Serving now_;
  int32_t max_load_ = 0;  // of best_
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

Status Exact(View<const int32_t> tokens, const ExactOptions& options, MatrixView<int32_t> placement,
             MatrixView<int32_t> quota) {
  if (Status bad = Check(tokens, options, placement, quota)) return bad;
  const size_t slots = placement.columns() - tokens.size() / placement.rows();
  Planner planner(tokens, placement.rows(), slots, options);
  Write(planner.Plan(options), placement, quota);
  return Ok();
}

}  // namespace moe_lb
