#include "ffi/planning/relay.h"

#include <algorithm>
#include <tuple>
#include <vector>

#include "ffi/planning/checks.h"

namespace moe_lb {
namespace {

Status Check(MatrixView<const int32_t> placement, const RelayOptions& options, MatrixView<int32_t> relay) {
  if (Status bad = CheckOptions(options)) return bad;
  if (options.num_home < 1 || options.num_home > static_cast<int64_t>(placement.columns())) {
    return Refuse("num_home is ", options.num_home, "; expected 1 to the ", placement.columns(), " slots of a rank");
  }
  const auto home = static_cast<size_t>(options.num_home);
  if (Status bad = CheckPlacement(placement, placement.rows() * home)) return bad;
  if (Status bad = CheckHomes(placement, home)) return bad;
  return CheckShape("relay", relay, placement.rows(), placement.columns());
}

// A replica; ranks ascend.
struct Replica {
  size_t rank;
  size_t slot;  // among those of all ranks
};

// By expert.
Status FindReplicas(MatrixView<const int32_t> placement, size_t num_home, std::vector<std::vector<Replica>>* replicas) {
  for (size_t rank = 0; rank < placement.rows(); ++rank) {
    for (size_t slot = num_home; slot < placement.columns(); ++slot) {
      if (placement[rank][slot] < 0) continue;
      const auto expert = static_cast<size_t>(placement[rank][slot]);
      std::vector<Replica>& of_expert = (*replicas)[expert];
      // Ranks are visited in ascending order, so a second slot on the same rank can only be the last one found.
      const bool twice = expert / num_home == rank || (!of_expert.empty() && of_expert.back().rank == rank);
      if (twice) return Refuse("placement holds expert ", expert, " twice on rank ", rank, "; expected once at most");
      of_expert.push_back({rank, rank * placement.columns() + slot});
    }
  }
  return Ok();
}

int64_t FloorSqrt(int64_t n) {
  int64_t root = 0;
  while ((root + 1) * (root + 1) <= n) ++root;
  return root;
}

// Returns the number of relays of an expert with n replicas; with 0 all of them copy from home.
size_t NumRelays(size_t num_replicas, const RelayOptions& options) {
  const auto n = static_cast<int64_t>(num_replicas);
  if (n < options.min_replicas) return 0;
  // The root of n approximately balances home, which sends k copies, and a relay, which sends (n - k) / k. Relays are
  // at most as many as other replicas, so each has a replica to forward to.
  const int64_t k = std::min({FloorSqrt(n), options.max_relays, n - 1});
  const int64_t most = std::max(k, (n - k + k - 1) / k);
  return n - most >= options.min_gain ? static_cast<size_t>(k) : 0;
}

class Trees {
 public:
  Trees(size_t num_ranks, const RelayOptions& options, View<int32_t> relay)
      : options_(options), relay_(relay), sends_(num_ranks, 0), relays_some_(num_ranks, 0) {}

  // replicas: of one expert, whose home is the rank `home`; their order is changed.
  void Plan(std::vector<Replica>* replicas, size_t home) {
    const size_t num_relays = NumRelays(replicas->size(), options_);
    const auto relays_end = replicas->begin() + static_cast<std::ptrdiff_t>(num_relays);
    const auto key = [this](const Replica& replica) {
      return std::make_tuple(sends_[replica.rank], relays_some_[replica.rank], replica.rank);
    };
    // The rank makes all keys distinct, so the result does not depend on the stability of the sort. The others are left
    // unordered and are sorted again.
    std::partial_sort(replicas->begin(), relays_end, replicas->end(),
                      [&](const Replica& a, const Replica& b) { return key(a) < key(b); });
    if (num_relays > 0) {
      std::sort(relays_end, replicas->end(), [](const Replica& a, const Replica& b) { return a.rank < b.rank; });
    }
    for (size_t i = 0; i < (num_relays > 0 ? num_relays : replicas->size()); ++i) Copy(home, (*replicas)[i]);
    for (size_t i = 0; i < num_relays; ++i) relays_some_[(*replicas)[i].rank] = 1;
    if (num_relays == 0) return;
    for (size_t i = num_relays; i < replicas->size(); ++i) {
      // Each relay first gets one replica, because a relay without one would only lengthen the path.
      const bool first = i - num_relays < num_relays;
      Copy(first ? (*replicas)[i - num_relays].rank : Idlest(*replicas, num_relays), (*replicas)[i]);
    }
  }

 private:
  void Copy(size_t from, const Replica& to) {
    relay_[to.slot] = static_cast<int32_t>(from);
    // Later experts avoid relays on ranks with many copies to send.
    ++sends_[from];
  }

  size_t Idlest(const std::vector<Replica>& replicas, size_t num_relays) const {
    size_t best = replicas[0].rank;
    for (size_t i = 1; i < num_relays; ++i) {
      if (sends_[replicas[i].rank] < sends_[best]) best = replicas[i].rank;
    }
    return best;
  }

  RelayOptions options_;
  View<int32_t> relay_;
  std::vector<int64_t> sends_;     // copies sent by a rank so far
  std::vector<char> relays_some_;  // true for ranks with a relay so far
};

}  // namespace

Status CheckOptions(const RelayOptions& options) {
  if (options.min_replicas < 2) return Refuse("min_replicas is ", options.min_replicas, "; expected at least 2");
  if (options.max_relays < 1) return Refuse("max_relays is ", options.max_relays, "; expected at least 1");
  if (options.min_gain < 1) return Refuse("min_gain is ", options.min_gain, "; expected at least 1");
  return Ok();
}

Status Relay(MatrixView<const int32_t> placement, const RelayOptions& options, MatrixView<int32_t> relay) {
  if (Status bad = Check(placement, options, relay)) return bad;
  const size_t num_ranks = placement.rows(), home = static_cast<size_t>(options.num_home);
  std::vector<std::vector<Replica>> replicas(num_ranks * home);
  if (Status bad = FindReplicas(placement, home, &replicas)) return bad;
  std::fill(relay.flat().begin(), relay.flat().end(), -1);
  for (size_t rank = 0; rank < num_ranks; ++rank) {
    std::fill_n(relay[rank].begin(), home, static_cast<int32_t>(rank));
  }
  Trees trees(num_ranks, options, relay.flat());
  for (size_t expert = 0; expert < replicas.size(); ++expert) trees.Plan(&replicas[expert], expert / home);
  return Ok();
}

}  // namespace moe_lb
