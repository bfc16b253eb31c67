#include "ffi/planning/ultraep.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "ffi/planning/checks.h"
#include "ffi/planning/holders.h"

namespace moe_lb {
namespace {

Status Check(MatrixView<const int32_t> placement, MatrixView<const int32_t> quota, const UltraEpOptions& options,
             MatrixView<int32_t> new_placement, MatrixView<int32_t> new_quota) {
  if (Status bad = CheckPlan(placement, quota, options.domain, new_placement, new_quota)) return bad;
  if (Status bad = CheckOptions(options)) return bad;
  return CheckHomes(placement, quota.rows() / placement.rows());
}

struct Replica {
  size_t expert;
  size_t rank;
  int64_t tokens;
};

enum class Floor { kDynamic, kFixed };

// The replicas of one domain. Ranks are numbered inside the domain, experts over all.
class Domain {
 public:
  Domain(MatrixView<const int32_t> placement, MatrixView<const int32_t> quota, const Holders& holders,
         const std::vector<int64_t>& load, size_t first, size_t members, int64_t min_tokens)
      : holders_(holders),
        slots_(placement.columns()),
        first_(first),
        home_(quota.rows() / placement.rows()),
        min_tokens_(min_tokens),
        load_(load.begin() + static_cast<std::ptrdiff_t>(first),
              load.begin() + static_cast<std::ptrdiff_t>(first + members)),
        empty_(members, 0),
        served_(members * home_),
        holder_of_(members, kNone) {
    for (size_t rank = 0; rank < members; ++rank) {
      const View<const int32_t> slots = placement[first + rank];
      empty_[rank] = static_cast<size_t>(std::count(slots.begin(), slots.end(), -1));
    }
    for (size_t i = 0; i < served_.size(); ++i) served_[i] = quota[first * home_ + i][first + i / home_];
    Sort();
  }

  // Finds the lowest limit under which the surplus fits, and its replicas.
  const std::vector<Replica>& Plan(float eps) {
    const auto members = static_cast<int64_t>(load_.size());
    const int64_t low = (std::accumulate(load_.begin(), load_.end(), int64_t{0}) + members - 1) / members;
    const int64_t high = *std::max_element(load_.begin(), load_.end());
    // The last attempt of a search may have failed and overwritten `replicas_`, so repeat the attempt at the limit
    // found.
    if (!Ladder(low, high, eps)) Attempt(Search(low, high), Floor::kFixed);
    return replicas_;
  }

 private:
  static constexpr size_t kNone = SIZE_MAX;

  void Sort() {
    by_load_.resize(load_.size());
    std::iota(by_load_.begin(), by_load_.end(), size_t{0});
    // Both sorts are stable, so that ties go to the lower rank and expert, as in the JAX reference.
    std::stable_sort(by_load_.begin(), by_load_.end(), [&](size_t a, size_t b) { return load_[a] > load_[b]; });
    by_served_.resize(served_.size());
    std::iota(by_served_.begin(), by_served_.end(), size_t{0});
    for (auto rank = by_served_.begin(); rank != by_served_.end(); rank += static_cast<std::ptrdiff_t>(home_)) {
      std::stable_sort(rank, rank + static_cast<std::ptrdiff_t>(home_),
                       [&](size_t a, size_t b) { return served_[a] > served_[b]; });
    }
  }

  bool Ladder(int64_t low, int64_t high, float eps) {
    // float32 as in the JAX reference, so that both try the same limits. Compared before the conversion, because it may
    // exceed the range of integers.
    const float first = std::ceil(static_cast<float>(low) * (1.0f + eps));
    int64_t limit = first >= static_cast<float>(high) ? high : std::max(low, static_cast<int64_t>(first));
    for (int attempt = 0; attempt < 3; ++attempt) {
      if (Attempt(limit, Floor::kDynamic)) return true;
      limit = std::min(high, limit + std::max<int64_t>(1, (high + 99) / 100));
    }
    return false;
  }

  // `high` always succeeds: the largest load needs no replica, and all other limits were tried.
  int64_t Search(int64_t low, int64_t high) {
    if (Attempt(low, Floor::kFixed)) return low;
    while (low < high) {
      const int64_t width = high - low;
      if (width <= 4) {
        if (Attempt(low, Floor::kFixed)) return low;
        ++low;
        continue;
      }
      // The four limits divide the initial range, although `low` moves with each failure.
      const int64_t base = low;
      for (int64_t part = 1; part <= 4; ++part) {
        const int64_t limit = base + width * part / 5;
        if (Attempt(limit, Floor::kFixed)) {
          high = limit;
          break;
        }
        low = limit + 1;
      }
    }
    return high;
  }

  // Fills replicas_; returns false if the surplus does not fit.
  //
  // Every limit is at least the mean, so the total room below it is at least the total surplus above. The released code
  // tests this and bisects on it because of its rounding; neither is needed here.
  bool Attempt(int64_t limit, Floor floor) {
    replicas_.clear();
    room_.clear();
    for (const int64_t load : load_) room_.push_back(std::max<int64_t>(limit - load, 0));
    open_ = empty_;
    std::fill(holder_of_.begin(), holder_of_.end(), kNone);
    for (const size_t donor : by_load_) {
      // Ranks are sorted by load, so none after this one has a surplus.
      if (load_[donor] <= limit) break;
      if (!Give(donor, load_[donor] - limit, floor)) return false;
    }
    return true;
  }

  bool Give(size_t donor, int64_t need, Floor floor) {
    for (size_t i = donor * home_; i < (donor + 1) * home_ && need > 0; ++i) {
      const size_t expert = by_served_[i];
      MarkHolders(expert);
      // The home keeps one token, as in the released code.
      int64_t left = served_[expert] - 1;
      while (need > 0 && left > 0) {
        const auto [rank, candidates] = MostRoom(expert);
        if (candidates == 0) break;
        // The rank with the most room can take the most: if it would get less than the floor, so would all others.
        const int64_t tokens = std::min({need, room_[rank], left});
        if (tokens < (floor == Floor::kFixed ? min_tokens_ : (need + candidates - 1) / candidates)) break;
        replicas_.push_back({first_ * home_ + expert, first_ + rank, tokens});
        room_[rank] -= tokens;
        --open_[rank];
        holder_of_[rank] = expert;
        need -= tokens;
        left -= tokens;
      }
    }
    return need == 0;
  }

  // Marks the existing replicas of the expert. Marks need no clearing between experts, because an attempt visits each
  // expert once.
  void MarkHolders(size_t expert) {
    const size_t number = first_ * home_ + expert;
    for (size_t slot = holders_.First(number); slot != Holders::kEnd; slot = holders_.Next(slot)) {
      const size_t rank = slot / slots_ - first_;  // past the end if below first_
      if (rank < holder_of_.size()) holder_of_[rank] = expert;
    }
  }

  struct Candidate {
    size_t rank;         // with most room
    int64_t candidates;  // how many there are
  };

  Candidate MostRoom(size_t expert) const {
    Candidate best = {0, 0};
    int64_t most = 0;
    for (size_t rank = 0; rank < room_.size(); ++rank) {
      if (room_[rank] == 0 || open_[rank] == 0 || holder_of_[rank] == expert) continue;
      ++best.candidates;
      if (room_[rank] <= most) continue;
      most = room_[rank];
      best.rank = rank;
    }
    return best;
  }

  const Holders& holders_;
  size_t slots_;
  size_t first_;  // rank
  size_t home_;   // experts per rank
  int64_t min_tokens_;
  std::vector<int64_t> load_;      // per rank
  std::vector<size_t> empty_;      // slots per rank
  std::vector<int64_t> served_;    // per expert of the domain, tokens served by its home
  std::vector<size_t> by_load_;    // ranks, highest load first
  std::vector<size_t> by_served_;  // each rank's experts of the domain, most served first
  std::vector<Replica> replicas_;  // of the last attempt
  std::vector<int64_t> room_;      // per rank, in an attempt
  std::vector<size_t> open_;       // likewise, empty slots
  std::vector<size_t> holder_of_;  // likewise, the last expert marked on the rank
};

std::vector<int64_t> Loads(MatrixView<const int32_t> quota) {
  std::vector<int64_t> load(quota.columns(), 0);
  for (size_t expert = 0; expert < quota.rows(); ++expert) {
    for (size_t rank = 0; rank < quota.columns(); ++rank) load[rank] += quota[expert][rank];
  }
  return load;
}

}  // namespace

Status CheckOptions(const UltraEpOptions& options) {
  // A NaN fails both comparisons, so it is refused too.
  if (!(options.eps >= 0 && options.eps <= 1)) return Refuse("eps is ", options.eps, "; expected 0 to 1");
  if (options.min_tokens < 1) return Refuse("min_tokens is ", options.min_tokens, "; expected at least 1");
  return Ok();
}

Status UltraEp(MatrixView<const int32_t> placement, MatrixView<const int32_t> quota, const UltraEpOptions& options,
               MatrixView<int32_t> new_placement, MatrixView<int32_t> new_quota) {
  if (Status bad = Check(placement, quota, options, new_placement, new_quota)) return bad;
  std::copy(placement.flat().begin(), placement.flat().end(), new_placement.flat().begin());
  std::copy(quota.flat().begin(), quota.flat().end(), new_quota.flat().begin());
  const Holders holders(placement, quota.rows());
  const std::vector<int64_t> load = Loads(quota);
  const size_t home = quota.rows() / placement.rows();
  const auto members = static_cast<size_t>(options.domain);
  for (size_t first = 0; first < placement.rows(); first += members) {
    Domain ranks(placement, quota, holders, load, first, members, options.min_tokens);
    for (const Replica& replica : ranks.Plan(options.eps)) {
      const View<int32_t> slots = new_placement[replica.rank];
      *std::find(slots.begin(), slots.end(), -1) = static_cast<int32_t>(replica.expert);
      new_quota[replica.expert][replica.expert / home] -= static_cast<int32_t>(replica.tokens);
      new_quota[replica.expert][replica.rank] += static_cast<int32_t>(replica.tokens);
    }
  }
  return Ok();
}

}  // namespace moe_lb
