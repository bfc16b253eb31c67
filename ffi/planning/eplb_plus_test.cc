#include "ffi/planning/eplb_plus.h"

#include <vector>

#include "ffi/common/testing.h"

namespace {

using moe_lb::EplbPlus;
using moe_lb::Status;
using std::vector;

struct Plan {
  size_t num_ranks;
  vector<int32_t> tokens;     // [E]
  vector<int32_t> placement;  // [R, S]
  vector<int32_t> quota;      // [E, R]

  Status Run(int64_t domain) {
    const vector<int32_t> old_placement = placement;
    const size_t slots = placement.size() / num_ranks;
    quota.assign(tokens.size() * num_ranks, -7);
    return EplbPlus({tokens.data(), tokens.size()}, {old_placement.data(), num_ranks, slots}, {domain},
                    {placement.data(), num_ranks, slots}, {quota.data(), tokens.size(), num_ranks});
  }
};

void ExpectPlan(Plan plan, int64_t domain, const vector<int32_t>& placement, const vector<int32_t>& quota) {
  EXPECT(!plan.Run(domain));
  EXPECT(plan.placement == placement);
  EXPECT(plan.quota == quota);
}

// Shares 13, 2, 4, 0: expert 0 gets a copy (7), another (5), a third (4); then expert 2, after expert 0
// has as many copies as there are ranks. Loads of homes 4, 2, 2, 0: expert 0's copies go to ranks 3,
// 1 and 2, the one of expert 2 to the last rank with an empty slot.
void TheHeaviestGetCopies() {
  ExpectPlan({4, {13, 2, 4, 0}, {0, -1, 1, -1, 2, -1, 3, -1}, {}}, 4, {0, 2, 1, 0, 2, 0, 3, 0},
             {4, 3, 3, 3, 0, 2, 0, 0, 2, 0, 2, 0, 0, 0, 0, 0});
}

void CopiesAreCountedWhereTheyAre() {
  ExpectPlan({2, {10, 9}, {0, 1, -1, 1, -1, -1}, {}}, 2, {0, 1, -1, 1, 0, -1}, {5, 5, 5, 4});
}

void DomainsKeepTheirExperts() {
  ExpectPlan({4, {8, 0, 0, 6}, {0, -1, 1, -1, 2, -1, 3, -1}, {}}, 2, {0, -1, 1, 0, 2, 3, 3, -1},
             {4, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 3});
}

void NoRedundantCopies() {
  ExpectPlan({2, {0, 1}, {0, -1, 1, -1}, {}}, 2, {0, -1, 1, -1}, {0, 0, 0, 1});
  ExpectPlan({2, {9, 1}, {0, 1}, {}}, 2, {0, 1}, {9, 0, 0, 1});
  ExpectPlan({1, {9, 4}, {0, 1, -1}, {}}, 1, {0, 1, -1}, {9, 4});
}

void LargeNumbersDoNotOverflow() {
  ExpectPlan({2, {2147483647, 0}, {0, -1, 1, -1}, {}}, 2, {0, -1, 1, 0}, {1073741824, 1073741823, 0, 0});
}

void BadArgumentsAreNamed() {
  const auto refusal = [](Plan plan, int64_t domain) { return *plan.Run(domain); };
  EXPECT_EQ(refusal({2, {1, 1}, {0, 1}, {}}, 0), "domain is 0; expected a divisor of the 2 ranks");
  EXPECT_EQ(refusal({3, {1, 1, 1}, {0, 1, 2}, {}}, 2), "domain is 2; expected a divisor of the 3 ranks");
  EXPECT_EQ(refusal({2, {1, 1, 1}, {0, 1}, {}}, 2),
            "tokens has 3 experts; expected a positive multiple of the 2 ranks");
  EXPECT_EQ(refusal({2, {1, -1}, {0, 1}, {}}, 2), "tokens of expert 1 is -1; expected at least 0");
  EXPECT_EQ(refusal({2, {2147483647, 1}, {0, 1}, {}}, 2), "tokens sum to 2147483648; expected at most 2147483647");
  EXPECT_EQ(refusal({2, {1, 3}, {0, 0}, {}}, 2), "tokens of expert 1 is 3; expected 0: no slot holds it");
  EXPECT_EQ(refusal({2, {1, 1}, {0, 2}, {}}, 2),
            "placement of rank 1, slot 0 is 2; expected an expert below 2, or -1 for an empty slot");
  vector<int32_t> a(4, 0), b(4, 0), c(4, 0);
  EXPECT_EQ(*EplbPlus({a.data(), 2}, {b.data(), 2, 2}, {1}, {c.data(), 1, 4}, {c.data(), 2, 2}),
            "new_placement has shape [1, 4]; expected [2, 2]");
  EXPECT_EQ(*EplbPlus({a.data(), 2}, {b.data(), 2, 2}, {1}, {c.data(), 2, 2}, {c.data(), 4, 1}),
            "quota has shape [4, 1]; expected [2, 2]");
}

}  // namespace

int main() {
  TheHeaviestGetCopies();
  CopiesAreCountedWhereTheyAre();
  DomainsKeepTheirExperts();
  NoRedundantCopies();
  LargeNumbersDoNotOverflow();
  BadArgumentsAreNamed();
}
