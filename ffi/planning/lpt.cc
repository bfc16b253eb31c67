#include "ffi/planning/lpt.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <utility>
#include <vector>

#include "ffi/planning/checks.h"

namespace moe_lb {
namespace {

Status Check(View<const int32_t> weights, int64_t num_bins, int64_t capacity, View<int32_t> bins) {
  const auto num_items = static_cast<int64_t>(weights.size());
  if (num_bins < 1) return Refuse("num_bins is ", num_bins, "; expected at least 1");
  const int64_t needed = num_items / num_bins + (num_items % num_bins != 0);
  if (capacity < needed) {
    return Refuse("capacity is ", capacity, "; expected at least ", needed, " for ", num_items, " items in ", num_bins,
                  " bins");
  }
  if (bins.size() != weights.size()) {
    return Refuse("bins has ", bins.size(), " entries; expected ", weights.size(), ", as weights has");
  }
  int64_t sum = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    if (weights[i] < 0) return Refuse("weights of item ", i, " is ", weights[i], "; expected at least 0");
    sum += weights[i];
  }
  if (sum > kMaxTokens) return Refuse("weights sum to ", sum, "; expected at most ", kMaxTokens);
  return Ok();
}

}  // namespace

Status Lpt(View<const int32_t> weights, int64_t num_bins, int64_t capacity, View<int32_t> bins) {
  if (Status bad = Check(weights, num_bins, capacity, bins)) return bad;
  std::vector<int32_t> order(weights.size());
  std::iota(order.begin(), order.end(), 0);
  const auto weight = [&](int32_t item) { return weights[static_cast<size_t>(item)]; };
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return weight(a) > weight(b); });

  using Bin = std::pair<int64_t, int32_t>;  // load, index: the smallest pair is the lightest, lowest bin
  // Empty bins are used from the lowest on, so N items never reach bin N.
  const size_t reachable = std::min(static_cast<size_t>(num_bins), weights.size());
  std::vector<Bin> start;
  for (size_t bin = 0; bin < reachable; ++bin) start.emplace_back(0, static_cast<int32_t>(bin));
  std::priority_queue<Bin, std::vector<Bin>, std::greater<Bin>> open(std::greater<Bin>(), std::move(start));
  std::vector<int64_t> items_in(reachable, 0);
  for (const int32_t item : order) {
    auto [load, bin] = open.top();
    open.pop();
    bins[static_cast<size_t>(item)] = bin;
    if (++items_in[static_cast<size_t>(bin)] < capacity) open.emplace(load + weight(item), bin);
  }
  return Ok();
}

}  // namespace moe_lb
