#include "ffi/planning/quota.h"

#include <vector>

#include "ffi/common/testing.h"

namespace {

using moe_lb::Quota;
using moe_lb::Status;
using std::vector;

// Of R ranks with S slots each; `placement` row by row.
struct Case {
  vector<int32_t> tokens;
  vector<int32_t> placement;
  size_t num_ranks;
  vector<int32_t> quota = vector<int32_t>(tokens.size() * num_ranks, -7);

  Status Run() {
    return Quota({tokens.data(), tokens.size()}, {placement.data(), num_ranks, placement.size() / num_ranks},
                 {quota.data(), tokens.size(), num_ranks});
  }
};

vector<int32_t> Poured(Case c) {
  EXPECT(!c.Run());
  return c.quota;
}

void OneHolderServesAll() { EXPECT((Poured({{5, 3}, {0, 1}, 2}) == vector<int32_t>{5, 0, 0, 3})); }

void ExpertsWithoutAChoiceGoFirst() {
  // Expert 0 is heavier, but expert 1 is only on rank 0: 6 there, so 10 - 8 of expert 0 go on top.
  EXPECT((Poured({{10, 6}, {0, 1, 0, -1}, 2}) == vector<int32_t>{2, 8, 6, 0}));
}

void TheRestGoesToTheLowestRanks() {
  EXPECT((Poured({{11}, {0, 0, 0, 0}, 4}) == vector<int32_t>{3, 3, 3, 2}));
  // Loads 0, 5, 1: ranks 0 and 2 reach 3 with 5 tokens, and rank 0 gets the sixth.
  EXPECT((Poured({{6, 5, 1}, {0, -1, 0, 1, 0, 2}, 3}) == vector<int32_t>{4, 0, 2, 0, 5, 0, 0, 0, 1}));
}

void HeaviestFirstAndTiesToTheLowerExpert() {
  // Expert 1 is poured first, onto ranks 1 and 2; expert 0 fills rank 0 up.
  EXPECT((Poured({{4, 8}, {0, -1, 0, 1, 1, -1}, 3}) == vector<int32_t>{4, 0, 0, 0, 4, 4}));
  EXPECT((Poured({{3, 3}, {0, 1, 0, 1}, 2}) == vector<int32_t>{2, 1, 1, 2}));
}

void SeveralSlotsOnARankCountAsOne() {
  EXPECT((Poured({{9}, {0, 0, 0, -1}, 2}) == vector<int32_t>{5, 4}));
  EXPECT((Poured({{9}, {0, 0}, 1}) == vector<int32_t>{9}));
}

void NoTokensNeedNoSlot() {
  EXPECT((Poured({{0, 2}, {1}, 1}) == vector<int32_t>{0, 2}));
  EXPECT(Poured({{}, {-1}, 1}).empty());
}

void TheLargestSumFits() { EXPECT((Poured({{2147483647}, {0, 0}, 2}) == vector<int32_t>{1073741824, 1073741823})); }

void BadArgumentsAreNamed() {
  const auto refusal = [](Case c) { return *c.Run(); };
  EXPECT_EQ(refusal({{1, 2}, {0, -1}, 1}), "tokens of expert 1 is 2; expected 0: no slot holds it");
  EXPECT_EQ(refusal({{1, -2}, {0, 1}, 1}), "tokens of expert 1 is -2; expected at least 0");
  EXPECT_EQ(refusal({{2147483647, 1}, {0, 1}, 1}), "tokens sum to 2147483648; expected at most 2147483647");
  EXPECT_EQ(refusal({{1}, {0, 1}, 2}),
            "placement of rank 1, slot 0 is 1; expected an expert below 1, or -1 for an empty slot");
  EXPECT_EQ(refusal({{1}, {0, -2}, 2}),
            "placement of rank 1, slot 0 is -2; expected an expert below 1, or -1 for an empty slot");
  EXPECT_EQ(*Quota({nullptr, 0}, {nullptr, 2, 0}, {nullptr, 0, 2}),
            "placement has shape [2, 0]; expected [R, S], both at least 1");
  const vector<int32_t> tokens = {1}, placement = {0};
  vector<int32_t> quota(2);
  EXPECT_EQ(*Quota({tokens.data(), 1}, {placement.data(), 1, 1}, {quota.data(), 1, 2}),
            "quota has shape [1, 2]; expected [1, 1]");
}

}  // namespace

int main() {
  OneHolderServesAll();
  ExpertsWithoutAChoiceGoFirst();
  TheRestGoesToTheLowestRanks();
  HeaviestFirstAndTiesToTheLowerExpert();
  SeveralSlotsOnARankCountAsOne();
  NoTokensNeedNoSlot();
  TheLargestSumFits();
  BadArgumentsAreNamed();
}
