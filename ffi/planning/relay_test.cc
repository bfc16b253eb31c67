#include "ffi/planning/relay.h"

#include <vector>

#include "ffi/common/testing.h"

namespace {

using namespace moe_lb;  // NOLINT: a test
using std::vector;

// One home expert on every rank, and `slots` more slots with the experts replicas[rank].
struct Ranks {
  explicit Ranks(const vector<vector<int32_t>>& replicas) : num_ranks(replicas.size()), slots(replicas[0].size() + 1) {
    for (size_t rank = 0; rank < num_ranks; ++rank) {
      placement.push_back(static_cast<int32_t>(rank));
      placement.insert(placement.end(), replicas[rank].begin(), replicas[rank].end());
    }
    relay.assign(placement.size(), -7);
  }

  Status Run(const RelayOptions& options = {1}) {
    return Relay({placement.data(), num_ranks, slots}, options, {relay.data(), num_ranks, slots});
  }

  // Sources of the first replica slots.
  vector<int32_t> Sources(const RelayOptions& options = {1}) {
    EXPECT(!Run(options));
    vector<int32_t> sources;
    for (size_t rank = 0; rank < num_ranks; ++rank) sources.push_back(relay[rank * slots + 1]);
    return sources;
  }

  size_t num_ranks;
  size_t slots;
  vector<int32_t> placement;
  vector<int32_t> relay;
};

// Expert 0 on `num_replicas` of 12 ranks.
Ranks Popular(size_t num_replicas) {
  vector<vector<int32_t>> replicas(12, {-1});
  for (size_t rank = 1; rank <= num_replicas; ++rank) replicas[rank] = {0};
  return Ranks(replicas);
}

void FewReplicasCopyFromHome() {
  EXPECT((Popular(3).Sources() == vector<int32_t>{-1, 0, 0, 0, -1, -1, -1, -1, -1, -1, -1, -1}));
}

void ATreeOfTwoLevels() {
  // sqrt(9): three relays, each with two of the other six.
  EXPECT((Popular(9).Sources() == vector<int32_t>{-1, 0, 0, 0, 1, 2, 3, 1, 2, 3, -1, -1}));
  // sqrt(4): home and the busier relay send two each, and so the home saves two copies.
  EXPECT((Popular(4).Sources() == vector<int32_t>{-1, 0, 0, 1, 2, -1, -1, -1, -1, -1, -1, -1}));
  // Of five, two relays: the third leaf goes to the first of them.
  EXPECT((Popular(5).Sources() == vector<int32_t>{-1, 0, 0, 1, 2, 1, -1, -1, -1, -1, -1, -1}));
}

void OptionsBoundIt() {
  EXPECT((Popular(4).Sources({1, 5, 8, 2}) == vector<int32_t>{-1, 0, 0, 0, 0, -1, -1, -1, -1, -1, -1, -1}));
  EXPECT((Popular(4).Sources({1, 4, 8, 3}) == vector<int32_t>{-1, 0, 0, 0, 0, -1, -1, -1, -1, -1, -1, -1}));
  EXPECT((Popular(5).Sources({1, 4, 1, 1}) == vector<int32_t>{-1, 0, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1}));
  EXPECT((Popular(5).Sources({1, 4, 1, 2}) == vector<int32_t>{-1, 0, 0, 0, 0, 0, -1, -1, -1, -1, -1, -1}));
}

void RelaysAreRanksThatSendLittle() {
  // Experts 0 and 1 on ranks 2 to 5, in two slots: the relays of 0 are 2 and 3, and those of 1 the other two.
  Ranks both({{-1, -1}, {-1, -1}, {0, 1}, {0, 1}, {0, 1}, {0, 1}});
  EXPECT(!both.Run());
  EXPECT((both.relay == vector<int32_t>{0, -1, -1, 1, -1, -1, 2, 0, 4, 3, 0, 5, 4, 2, 1, 5, 3, 1}));
}

void BadArgumentsAreNamed() {
  const auto refusal = [](Ranks ranks, const RelayOptions& options = {1}) { return *ranks.Run(options); };
  EXPECT_EQ(refusal(Popular(1), {0}), "num_home is 0; expected 1 to the 2 slots of a rank");
  EXPECT_EQ(refusal(Popular(1), {3}), "num_home is 3; expected 1 to the 2 slots of a rank");
  EXPECT_EQ(refusal(Popular(1), {1, 1, 8, 2}), "min_replicas is 1; expected at least 2");
  EXPECT_EQ(refusal(Popular(1), {1, 4, 0, 2}), "max_relays is 0; expected at least 1");
  EXPECT_EQ(refusal(Popular(1), {1, 4, 8, 0}), "min_gain is 0; expected at least 1");
  EXPECT_EQ(refusal(Ranks({{-1}, {2}})),
            "placement of rank 1, slot 1 is 2; expected an expert below 2, or -1 for an empty slot");
  EXPECT_EQ(refusal(Ranks({{0}, {-1}})), "placement holds expert 0 twice on rank 0; expected once at most");
  EXPECT_EQ(refusal(Ranks({{-1, -1}, {0, 0}})), "placement holds expert 0 twice on rank 1; expected once at most");
  Ranks moved({{-1}, {-1}});
  moved.placement[2] = 0;
  EXPECT_EQ(refusal(moved), "placement of rank 1, slot 0 is 0; expected its home expert 1");
  vector<int32_t> placement = {0, -1, 1, -1}, relay(4);
  EXPECT_EQ(*Relay({placement.data(), 2, 2}, {1}, {relay.data(), 4, 1}), "relay has shape [4, 1]; expected [2, 2]");
}

}  // namespace

int main() {
  FewReplicasCopyFromHome();
  ATreeOfTwoLevels();
  OptionsBoundIt();
  RelaysAreRanksThatSendLittle();
  BadArgumentsAreNamed();
}
