#include "ffi/testing/cuda/planned_layer.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <utility>

#include "ffi/common/testing.h"
#include "ffi/planning/feplb.h"
#include "ffi/planning/greedy.h"
#include "ffi/testing/cuda/stand_in.h"

namespace moe_lb::testing {
namespace {

constexpr XLA_FFI_DataType kS32 = XLA_FFI_DataType_S32;

using Planner = PlannedLayer::Planner;

const char* NameOf(Planner planner) { return planner == Planner::kGreedy ? "greedy" : "feplb"; }

GreedyOptions GreedyOf(const LayerShape& shape) { return {shape.ranks}; }

FeplbOptions FeplbOf(const LayerShape& shape) { return {shape.ranks, shape.home, shape.slots, 1, true}; }

Attributes OptionsOf(const LayerShape& shape, Planner planner) {
  return planner == Planner::kGreedy ? AttributesOf(GreedyOf(shape)) : AttributesOf(FeplbOf(shape));
}

Attributes PostSiteOf(const LayerShape& shape, Planner planner, int64_t more) {
  Attributes attributes = SiteOf(shape);
  const int64_t columns = shape.home + shape.slots;
  attributes["plan_size"] = Int(shape.ranks * columns + shape.experts() * shape.ranks + more);
  attributes["num_kinds"] = Int(static_cast<int64_t>(shape.widths.size()));
  attributes["planner"] = Text(NameOf(planner));
  attributes["options"] = Dictionary(OptionsOf(shape, planner));
  return attributes;
}

struct Plan {
  std::vector<int32_t> placement;  // [ranks, home + slots]
  std::vector<int32_t> quota;      // [experts, ranks]
};

// Returns a plan without replicas and with random loads.
Plan StartOf(const LayerShape& shape, int64_t run) {
  std::minstd_rand random(static_cast<unsigned>(run) + 7);
  const int64_t columns = shape.home + shape.slots;
  Plan plan = {std::vector<int32_t>(static_cast<size_t>(shape.ranks * columns), -1),
               std::vector<int32_t>(static_cast<size_t>(shape.experts() * shape.ranks), 0)};
  for (int64_t expert = 0; expert < shape.experts(); ++expert) {
    const int64_t rank = expert / shape.home;
    plan.placement[static_cast<size_t>(rank * columns + expert % shape.home)] = static_cast<int32_t>(expert);
    const auto load = static_cast<int32_t>(random() % 1000 * (random() % 5 == 0 ? 9 : 1));
    plan.quota[static_cast<size_t>(expert * shape.ranks + rank)] = load;
  }
  return plan;
}

Plan PlanOf(const LayerShape& shape, const Plan& start, Planner planner = Planner::kGreedy) {
  Plan plan = start;
  const auto ranks = static_cast<size_t>(shape.ranks), experts = static_cast<size_t>(shape.experts());
  const auto columns = static_cast<size_t>(shape.home + shape.slots);
  const MatrixView<const int32_t> placement(start.placement.data(), ranks, columns);
  const MatrixView<const int32_t> quota(start.quota.data(), experts, ranks);
  const MatrixView<int32_t> new_placement(plan.placement.data(), ranks, columns);
  const MatrixView<int32_t> new_quota(plan.quota.data(), experts, ranks);
  if (planner == Planner::kGreedy) {
    static_cast<void>(Greedy(placement, quota, GreedyOf(shape), new_placement, new_quota));
  } else {
    static_cast<void>(Feplb(placement, quota, FeplbOf(shape), new_placement, new_quota));
  }
  return plan;
}

}  // namespace

PlannedLayer::PlannedLayer(LayerShape shape, Planner planner, int64_t more)
    : shape_(std::move(shape)),
      planner_(planner),
      post_(CudaXla(), CudaHandler("moe_lb_copy_post"), PostSiteOf(shape_, planner, more)),
      plan_(CudaXla(), CudaHandler(std::string("moe_lb_plan_") + NameOf(planner) + "_and_copy"),
            OptionsOf(shape_, planner)),
      join_(CudaXla(), CudaHandler("moe_lb_copy_join"), {}) {}

Ending PlannedLayer::Run(Gpu& gpu, int64_t rank, int64_t run, const Between& between) {
  const Plan start = StartOf(shape_, run), expected = PlanOf(shape_, start, planner_);
  const int64_t columns = shape_.home + shape_.slots;
  Weights weights;
  Ending ending;
  {
    Program program(gpu, run);
    weights = WeightsIn(program, shape_);
    const Weights again = WeightsIn(program, shape_);
    const DeviceArray place = program.New(kS32, {2}), x = program.New(kS32, {16});
    const DeviceArray posted = program.New(kS32, {2}), ticket = program.New(kS32, {2});
    const DeviceArray placement = program.New(kS32, {shape_.ranks, columns});
    const DeviceArray quota = program.New(kS32, {shape_.experts(), shape_.ranks});
    const DeviceArray new_placement = program.New(kS32, placement.dims), new_quota = program.New(kS32, quota.dims);
    const DeviceArrays& home = between.other_home ? again.home : weights.home;
    Invocation& post = program.Add(post_, Joined({{place, placement, quota}, weights.home, {x}}),
                                   Joined({{posted}, weights.slots, {x}}));
    Invocation& plan = program.Add(plan_, Joined({{placement, quota, posted}, home, weights.slots, {x}}),
                                   Joined({{new_placement, new_quota, ticket}, weights.slots, {x}}));
    Invocation& join = program.Add(join_, Joined({{ticket}, weights.slots, home, {x}}), weights.slots);
    program.Launch([=, shape = shape_] {
      Int32s(place)[0] = static_cast<int32_t>(rank);
      Int32s(place)[1] = 0;
      std::copy(start.placement.begin(), start.placement.end(), Int32s(placement));
      std::copy(start.quota.begin(), start.quota.end(), Int32s(quota));
      for (int32_t i = 0; i < 16; ++i) Int32s(x)[i] = static_cast<int32_t>(run) + i;
      for (size_t kind = 0; kind < shape.widths.size(); ++kind) {
        WriteHome(shape, weights.home[kind], run, rank, kind);
        WriteHome(shape, again.home[kind], run, rank, kind);
      }
    });
    program.Execute(post);
    Wave(program, between);
    if (!between.fails) {
      program.Execute(plan);
      program.Execute(join);
      program.Launch([=, wrong = &wrong_] {
        const auto differs = [wrong](const std::vector<int32_t>& values, const DeviceArray& array) {
          wrong->fetch_add(!std::equal(values.begin(), values.end(), Int32s(array)), std::memory_order_relaxed);
        };
        differs(expected.placement, new_placement);
        differs(expected.quota, new_quota);
        for (int32_t i = 0; i < 16; ++i) {
          wrong->fetch_add(Int32s(x)[i] != static_cast<int32_t>(run) + i, std::memory_order_relaxed);
        }
        for (const DeviceArray& array : {placement, quota, new_placement, new_quota, x}) {
          std::memset(array.data, 0xEE, array.size_bytes());
        }
      });
      const std::vector<int32_t> row = RowOf(expected.placement, rank, columns);
      const std::vector<int32_t> wanted(row.begin() + shape_.home, row.end());
      replicas_ += std::count_if(wanted.begin(), wanted.end(), [](int32_t expert) { return expert >= 0; });
      Consume(program, shape_, weights, run, wanted, &wrong_);
    }
    ending = program.ending();
  }
  if (between.fails) UseMemoryAgain(gpu, weights, &wrong_);
  return ending;
}

void PlanOnTwoStreams() {
  LayerShape shape;
  shape.ranks = 1;
  PlannedLayer planned(shape);
  Gpu slow(0, 0), busy(1, 0);
  Between wave;
  wave.wave_us = 30000;
  ExpectOk(planned.Run(slow, 0, 1, wave));
  for (int64_t run = 2; run <= 20; ++run) ExpectOk(planned.Run(busy, 0, run));
  Synchronize(slow.stream());
  Synchronize(busy.stream());
  EXPECT_EQ(planned.num_wrong(), 0);
}

// ---- planners as host functions ----------------------------------------------------

HostPlan::HostPlan(LayerShape shape)
    : shape_(std::move(shape)), plan_(CudaXla(), CudaHandler("moe_lb_plan_greedy"), AttributesOf(GreedyOf(shape_))) {}

Ending HostPlan::Run(Gpu& gpu, int64_t run, bool refused) {
  Plan start = StartOf(shape_, run);
  const Plan expected = PlanOf(shape_, start);
  if (refused) start.quota[0] = -1;
  Program program(gpu, run);
  const DeviceArray placement = program.New(kS32, {shape_.ranks, shape_.home + shape_.slots});
  const DeviceArray quota = program.New(kS32, {shape_.experts(), shape_.ranks});
  const DeviceArray new_placement = program.New(kS32, placement.dims), new_quota = program.New(kS32, quota.dims);
  const DeviceArray status = program.New(kS32, {1});
  Invocation& plan = program.Add(plan_, {placement, quota}, {new_placement, new_quota, status});
  program.Launch([=] {
    std::copy(start.placement.begin(), start.placement.end(), Int32s(placement));
    std::copy(start.quota.begin(), start.quota.end(), Int32s(quota));
  });
  if (before_execute) before_execute(program);
  program.Execute(plan);
  program.Launch([=, wrong = wrong_.get()] {
    bool right = Int32s(status)[0] == (refused ? 1 : 0);
    if (!refused) {
      right = right && std::equal(expected.placement.begin(), expected.placement.end(), Int32s(new_placement)) &&
              std::equal(expected.quota.begin(), expected.quota.end(), Int32s(new_quota));
    }
    wrong->fetch_add(!right, std::memory_order_relaxed);
    for (const DeviceArray& array : {placement, quota, new_placement, new_quota, status}) {
      std::memset(array.data, 0xEE, array.size_bytes());
    }
  });
  return program.ending();
}

}  // namespace moe_lb::testing
