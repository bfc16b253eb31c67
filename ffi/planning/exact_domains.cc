#include "ffi/planning/exact_domains.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "ffi/planning/checks.h"
#include "ffi/planning/exact.h"

namespace moe_lb {
namespace {

// Sums the counts of every expert, in the only pass over valid counts. Sums of 32 bits keep twice as many in a vector.
// A build with AVX2 is not measurably faster, so there is no dispatch.
Status SumCounts(MatrixView<const int32_t> counts, std::vector<int32_t>* tokens) {
  std::vector<uint32_t> sums(counts.columns(), 0);
  uint32_t bits = 0;
  for (size_t rank = 0; rank < counts.rows(); ++rank) {
    const int32_t* row = counts[rank].data();
    for (size_t expert = 0; expert < sums.size(); ++expert) {
      const auto count = static_cast<uint32_t>(row[expert]);
      bits |= count;
      sums[expert] += count;
    }
  }
  constexpr auto kMost = static_cast<uint64_t>(kMaxTokens);
  const uint64_t total = std::accumulate(sums.begin(), sums.end(), uint64_t{0});
  // No sum has wrapped around if all counts are below the largest token number by the number of ranks. Larger counts,
  // and negative ones, which have the highest bit, are added again in 64 bits.
  if (bits > kMost / counts.rows() || total > kMost) {
    if (Status bad = CheckCounts(counts)) return bad;
  }
  tokens->assign(sums.begin(), sums.end());
  return Ok();
}

Status Check(MatrixView<const int32_t> counts, int64_t domain, MatrixView<int32_t> placement,
             MatrixView<int32_t> quota) {
  const size_t num_ranks = counts.rows();
  const size_t num_experts = counts.columns();
  if (num_ranks < 1 || num_experts < 1 || num_experts % num_ranks != 0) {
    return Refuse("counts has ", num_experts, " experts; expected a positive multiple of the ", num_ranks, " ranks");
  }
  if (Status bad = CheckDomain(domain, num_ranks)) return bad;
  if (placement.rows() != num_ranks || placement.columns() < num_experts / num_ranks) {
    return Refuse("placement has shape [", placement.rows(), ", ", placement.columns(), "]; expected [", num_ranks,
                  ", S] with S at least the ", num_experts / num_ranks, " home experts of a rank");
  }
  return CheckShape("quota", quota, num_experts, num_ranks);
}

ExactOptions OfOneDomain(const ExactDomainsOptions& options) { return {options.eps, options.max_fan_out}; }

Status PlanOne(View<const int32_t> tokens, MatrixView<const int32_t> counts, const ExactDomainsOptions& options,
               MatrixView<int32_t> placement, MatrixView<int32_t> quota) {
  ExactOptions exact = OfOneDomain(options);
  if (options.localize) exact.counts = counts;
  exact.brief = options.brief;
  exact.counts_are_checked = true;
  return Exact(tokens, exact, placement, quota);
}

// One domain's arrays; ranks and experts are numbered inside it.
class Domain {
 public:
  // A rank needs at most as many slots as the domain has experts.
  Domain(size_t num_ranks, size_t num_experts, size_t slots)
      : num_ranks_(num_ranks),
        num_experts_(num_experts),
        slots_(std::min(slots, num_experts)),
        counts_(num_ranks * num_experts),
        placement_(num_ranks * slots_),
        quota_(num_experts * num_ranks) {}

  // tokens: [E], of all experts. Ranks of all domains count: their tokens for these experts are served here.
  Status Plan(View<const int32_t> tokens, MatrixView<const int32_t> counts, size_t first_rank, size_t first_expert,
              const ExactDomainsOptions& options) {
    for (size_t rank = 0; options.localize && rank < num_ranks_; ++rank) {
      const int32_t* row = counts[first_rank + rank].data() + first_expert;
      std::copy(row, row + num_experts_, counts_.data() + rank * num_experts_);
    }
    return PlanOne({tokens.data() + first_expert, num_experts_}, {counts_.data(), num_ranks_, num_experts_}, options,
                   {placement_.data(), num_ranks_, slots_}, {quota_.data(), num_experts_, num_ranks_});
  }

  void Write(size_t first_rank, size_t first_expert, MatrixView<int32_t> placement, MatrixView<int32_t> quota) const {
    // Only entries of this domain are written. All others are initialized as empty before the first domain.
    for (size_t rank = 0; rank < num_ranks_; ++rank) {
      for (size_t slot = 0; slot < slots_; ++slot) {
        const int32_t expert = placement_[rank * slots_ + slot];
        if (expert >= 0) placement[first_rank + rank][slot] = static_cast<int32_t>(first_expert) + expert;
      }
    }
    for (size_t i = 0; i < num_experts_; ++i) {
      const int32_t* row = quota_.data() + i * num_ranks_;
      std::copy(row, row + num_ranks_, quota[first_expert + i].data() + first_rank);
    }
  }

 private:
  size_t num_ranks_;
  size_t num_experts_;
  size_t slots_;
  std::vector<int32_t> counts_;     // [R, E]
  std::vector<int32_t> placement_;  // [R, S]
  std::vector<int32_t> quota_;      // [E, R]
};

}  // namespace

Status CheckOptions(const ExactDomainsOptions& options) { return CheckOptions(OfOneDomain(options)); }

Status ExactDomains(MatrixView<const int32_t> counts, const ExactDomainsOptions& options, MatrixView<int32_t> placement,
                    MatrixView<int32_t> quota) {
  if (Status bad = Check(counts, options.domain, placement, quota)) return bad;
  std::vector<int32_t> sums;
  if (Status bad = SumCounts(counts, &sums)) return bad;
  const View<const int32_t> tokens(sums.data(), sums.size());
  const auto members = static_cast<size_t>(options.domain);
  // Plans a single domain in place.
  if (members == counts.rows() && placement.columns() <= counts.columns()) {
    return PlanOne(tokens, counts, options, placement, quota);
  }
  std::fill(placement.flat().begin(), placement.flat().end(), -1);
  std::fill(quota.flat().begin(), quota.flat().end(), 0);
  const size_t home = counts.columns() / counts.rows();
  // All domains have the same shape, so one set of buffers serves them in order.
  Domain ranks(members, members * home, placement.columns());
  for (size_t first = 0; first < counts.rows(); first += members) {
    if (Status bad = ranks.Plan(tokens, counts, first, first * home, options)) return bad;
    ranks.Write(first, first * home, placement, quota);
  }
  return Ok();
}

}  // namespace moe_lb
