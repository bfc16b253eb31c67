#include "ffi/planning/exact_domains.h"

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "ffi/common/testing.h"
#include "ffi/planning/exact.h"

namespace moe_lb {
namespace {

using Numbers = std::vector<int32_t>;

struct Plan {
  Numbers placement;
  Numbers quota;
  std::string error;
};

// counts [R, E], by ranks.
Plan Make(const Numbers& counts, size_t num_ranks, size_t slots, int64_t domain, double eps = 0,
          int64_t max_fan_out = 100) {
  const size_t num_experts = counts.size() / num_ranks;
  Plan plan = {Numbers(num_ranks * slots, 99), Numbers(num_experts * num_ranks, 99), ""};
  plan.error = ExactDomains({counts.data(), num_ranks, num_experts}, {domain, eps, max_fan_out, true},
                            {plan.placement.data(), num_ranks, slots}, {plan.quota.data(), num_experts, num_ranks})
                   .value_or("");
  return plan;
}

// Ranks 0 and 1 share expert 0, ranks 2 and 3 expert 3, wherever the tokens start.
void DomainsArePlannedEachForItself() {
  const Numbers counts = {3, 0, 0, 1, 1, 0, 0, 9, 4, 0, 0, 0, 0, 0, 0, 2};  // four of each rank
  const Plan plan = Make(counts, 4, 2, 2);
  EXPECT_EQ(plan.error, "");
  EXPECT(plan.placement == (Numbers{0, -1, 1, 0, 2, 3, 3, -1}));
  EXPECT(plan.quota == (Numbers{4, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 6, 6}));
}

void SlotsBeyondAllExpertsOfADomainStayEmpty() {
  const Plan plan = Make({2, 4, 0, 0}, 2, 4, 1);
  EXPECT_EQ(plan.error, "");
  EXPECT(plan.placement == (Numbers{0, -1, -1, -1, 1, -1, -1, -1}));
  EXPECT(plan.quota == (Numbers{2, 0, 0, 4}));
}

void BadArgumentsAreNamed() {
  EXPECT_EQ(Make({1, 2, 3, 4, 5, 6}, 2, 2, 1).error,
            "counts has 3 experts; expected a positive multiple of the 2 ranks");
  EXPECT_EQ(Make({1, 2, 3, 4}, 2, 1, 3).error, "domain is 3; expected a divisor of the 2 ranks");
  EXPECT_EQ(Make({1, 2, 3, 4, 5, 6, 7, 8}, 2, 1, 1).error,
            "placement has shape [2, 1]; expected [2, S] with S at least the 2 home experts of a rank");
  EXPECT_EQ(Make({1, 2, -3, 4}, 2, 2, 2).error, "counts of rank 1, expert 0 is -3; expected at least 0");
  EXPECT_EQ(Make({INT32_MAX, 0, 1, 0}, 2, 2, 2).error, "counts sum to 2147483648 tokens; expected at most 2147483647");
  EXPECT_EQ(Make({1, 2, 3, 4}, 2, 2, 2, std::nan("")).error, "eps is nan; expected a finite number, at least 0");
  EXPECT_EQ(Make({1, 2, 3, 4}, 2, 2, 2, 0, -1).error, "max_fan_out is -1; expected at least 0");
}

}  // namespace
}  // namespace moe_lb

int main() {
  using namespace moe_lb;
  DomainsArePlannedEachForItself();
  SlotsBeyondAllExpertsOfADomainStayEmpty();
  BadArgumentsAreNamed();
}
