#include "ffi/testing/plan_verifiers.h"

#include <algorithm>
#include <cstring>
#include <sstream>

namespace moe_lb::testing {
namespace {

// An array of int32 as numbers, row by row.
struct Numbers {
  explicit Numbers(const Array& array) : columns(array.dims.back()), values(array.size()) {
    if (!values.empty()) std::memcpy(values.data(), array.bytes.data(), array.bytes.size());
  }
  Numbers(int64_t rows, int64_t num_columns, int32_t value)
      : columns(num_columns), values(static_cast<size_t>(rows * num_columns), value) {}

  int64_t rows() const { return columns == 0 ? 0 : static_cast<int64_t>(values.size()) / columns; }
  int32_t& at(int64_t row, int64_t column) { return values[static_cast<size_t>(row * columns + column)]; }
  int32_t at(int64_t row, int64_t column) const { return values[static_cast<size_t>(row * columns + column)]; }

  int64_t columns;
  std::vector<int32_t> values;
};

template <typename... Parts>
std::string Message(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

int64_t Integer(const Attributes& attributes, const std::string& name) {
  int64_t value;
  std::memcpy(&value, attributes.at(name).bytes.data(), sizeof(value));
  return value;
}

bool Holds(const Numbers& placement, int64_t rank, int64_t expert) {
  for (int64_t slot = 0; slot < placement.columns; ++slot) {
    if (placement.at(rank, slot) == expert) return true;
  }
  return false;
}

std::string VerifyPlacement(const Numbers& before, const Numbers& after, int64_t experts, int64_t domain) {
  const int64_t home = experts / before.rows();
  for (int64_t rank = 0; rank < before.rows(); ++rank) {
    for (int64_t slot = 0; slot < before.columns; ++slot) {
      const int32_t expert = after.at(rank, slot);
      if (expert == before.at(rank, slot)) continue;
      if (before.at(rank, slot) != -1) return Message("rank ", rank, ", slot ", slot, " was filled and has changed");
      if (expert < 0 || expert >= experts) return Message("rank ", rank, ", slot ", slot, " holds ", expert);
      // Weights do not cross domains.
      if (expert / home / domain != rank / domain)
        return Message("expert ", expert, " left its domain for rank ", rank);
      for (int64_t other = 0; other < before.columns; ++other) {
        if (other != slot && after.at(rank, other) == expert)
          return Message("rank ", rank, " has got ", expert, " twice");
      }
    }
  }
  return "";
}

// Verifies a quota. `before` is the quota before the plan, `tokens` the tokens of each expert.
std::string VerifyServed(const std::vector<int64_t>& tokens, const Numbers& before, const Numbers& placement,
                         const Numbers& after) {
  for (int64_t expert = 0; expert < after.rows(); ++expert) {
    int64_t served = 0;
    for (int64_t rank = 0; rank < after.columns; ++rank) {
      const int32_t quota = after.at(expert, rank);
      served += quota;
      if (quota < 0) return Message("quota of expert ", expert, ", rank ", rank, " is ", quota);
      // A plan may have tokens on ranks without the expert. A planner need not move them, but must not add
      // any.
      if (quota > before.at(expert, rank) && !Holds(placement, rank, expert)) {
        return Message("rank ", rank, " shall serve ", quota, " of expert ", expert, ", which it does not hold");
      }
    }
    const int64_t want = tokens[static_cast<size_t>(expert)];
    if (served != want) return Message("of expert ", expert, " ", served, " of ", want, " tokens are served");
  }
  return "";
}

std::vector<int64_t> RowSums(const Numbers& numbers) {
  std::vector<int64_t> sums(static_cast<size_t>(numbers.rows()), 0);
  for (size_t i = 0; i < numbers.values.size(); ++i) {
    sums[i / static_cast<size_t>(numbers.columns)] += numbers.values[i];
  }
  return sums;
}

std::string VerifyLoads(const Numbers& before, const Numbers& after, int64_t domain) {
  const auto highest = [domain](const Numbers& quota, int64_t first) {
    int64_t most = 0;
    for (int64_t rank = first; rank < first + domain; ++rank) {
      int64_t load = 0;
      for (int64_t expert = 0; expert < quota.rows(); ++expert) load += quota.at(expert, rank);
      most = std::max(most, load);
    }
    return most;
  };
  for (int64_t first = 0; first < before.columns; first += domain) {
    const int64_t was = highest(before, first), is = highest(after, first);
    // Planners reach different loads. None may raise the highest load.
    if (is > was)
      return Message("the highest load of the domain from rank ", first, " on rises from ", was, " to ", is);
  }
  return "";
}

// Returns the first nonempty message.
std::string First(std::initializer_list<std::string> messages) {
  for (const std::string& message : messages) {
    if (!message.empty()) return message;
  }
  return "";
}

}  // namespace

std::string VerifyEdit(const Attributes& attributes, const Operands& call, const std::vector<Array>& rets) {
  const Numbers placement(call.args[0]), quota(call.args[1]), new_placement(rets[0]), new_quota(rets[1]);
  const int64_t domain = Integer(attributes, "domain");
  return First({VerifyPlacement(placement, new_placement, quota.rows(), domain),
                VerifyServed(RowSums(quota), quota, new_placement, new_quota), VerifyLoads(quota, new_quota, domain)});
}

std::string VerifyFill(const Attributes& attributes, const Operands& call, const std::vector<Array>& rets) {
  const Numbers tokens(call.args[0]), placement(call.args[1]), new_placement(rets[0]), quota(rets[1]);
  const std::vector<int64_t> wanted(tokens.values.begin(), tokens.values.end());
  return First({VerifyPlacement(placement, new_placement, quota.rows(), Integer(attributes, "domain")),
                VerifyServed(wanted, Numbers(quota.rows(), quota.columns, 0), new_placement, quota)});
}

std::string VerifyExact(const Attributes& attributes, const Operands& call, const std::vector<Array>& rets) {
  const Numbers counts(call.args[0]), placement(rets[0]), quota(rets[1]);
  const int64_t experts = quota.rows(), ranks = quota.columns, home = experts / ranks;
  Numbers at_home(experts, ranks, 0), homes(ranks, placement.columns, -1);
  for (int64_t expert = 0; expert < experts; ++expert) {
    homes.at(expert / home, expert % home) = static_cast<int32_t>(expert);
    for (int64_t rank = 0; rank < ranks; ++rank) at_home.at(expert, expert / home) += counts.at(rank, expert);
  }
  const int64_t domain = Integer(attributes, "domain");
  return First({VerifyPlacement(homes, placement, experts, domain),
                VerifyServed(RowSums(at_home), Numbers(experts, ranks, 0), placement, quota),
                VerifyLoads(at_home, quota, domain)});
}

std::string VerifyExactKernel(const Attributes& attributes, const Operands& call, const std::vector<Array>& rets) {
  const auto plans = static_cast<size_t>(call.args[1].dims[0]);
  for (size_t plan = 0; plan < plans; ++plan) {
    std::vector<Array> only(rets.begin(), rets.begin() + 2);
    for (Array& ret : only) {
      ret.dims[0] /= static_cast<int64_t>(plans);
      const size_t bytes = ret.bytes.size() / plans;
      ret.bytes.erase(ret.bytes.begin(), ret.bytes.begin() + static_cast<int64_t>(plan * bytes));
      ret.bytes.resize(bytes);
    }
    if (const std::string bad = VerifyExact(attributes, call, only); !bad.empty()) return bad;
  }
  return "";
}

std::string VerifyRelay(const Attributes& attributes, const Operands& call, const std::vector<Array>& rets) {
  int64_t home;
  std::memcpy(&home, attributes.at("num_home").bytes.data(), sizeof(home));
  const Numbers placement(call.args[0]), relay(rets[0]);
  for (int64_t rank = 0; rank < placement.rows(); ++rank) {
    for (int64_t slot = 0; slot < placement.columns; ++slot) {
      const int64_t expert = placement.at(rank, slot), from = relay.at(rank, slot);
      const int64_t owner = expert < 0 ? -1 : expert / home;
      if (from == owner) continue;
      if (expert < 0) return Message("empty slot ", slot, " of rank ", rank, " copies from ", from);
      if (from < 0 || from >= placement.rows()) return Message("rank ", rank, ", slot ", slot, " copies from ", from);
      bool forwards = false;
      // A relay must copy from home: trees have two levels, and a longer chain could be a cycle.
      for (int64_t held = 0; held < placement.columns; ++held) {
        forwards = forwards || (placement.at(from, held) == expert && relay.at(from, held) == owner);
      }
      if (!forwards) return Message("rank ", from, " does not forward ", expert, " from home to ", rank);
    }
  }
  return "";
}

std::string VerifySpray(const Attributes& attributes, const Operands& call, const std::vector<Array>& rets) {
  const Numbers rows(call.args[0]), ticks(call.args[1]), rails(rets[0]);
  const int64_t members = Integer(attributes, "ranks_per_node"), num_rails = ticks.columns;
  for (int64_t from = 0; from < rows.rows(); ++from) {
    for (int64_t to = 0; to < rows.columns; ++to) {
      int64_t sum = 0;
      for (int64_t rail = 0; rail < num_rails; ++rail) {
        const int32_t on_rail = rails.at(from, to * num_rails + rail);
        const bool dead = ticks.at(0, rail) == 0 && from / members != to / members;
        if (on_rail < 0 || (dead && on_rail > 0))
          return Message("from ", from, " to ", to, " rail ", rail, " has ", on_rail);
        sum += on_rail;
      }
      if (sum != rows.at(from, to))
        return Message("from ", from, " to ", to, " ", sum, " of ", rows.at(from, to), " rows");
    }
  }
  return "";
}

}  // namespace moe_lb::testing
