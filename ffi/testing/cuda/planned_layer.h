// Planners of CUDA handlers on stand-in GPUs: a layer planning and copying on the device, and a planner on the host.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include "ffi/testing/cuda/layer_weights.h"

namespace moe_lb::testing {

// `copy_post`, a wave, `plan_<planner>_and_copy`, `copy_join`.
class PlannedLayer {
 public:
  enum class Planner { kGreedy, kFeplb };

  // more: added to the size of the plan, for a wrong one.
  explicit PlannedLayer(LayerShape shape, Planner planner = Planner::kGreedy, int64_t more = 0);

  Ending Run(Gpu& gpu, int64_t rank, int64_t run, const Between& between = {});

  int64_t num_wrong() const { return wrong_; }
  int64_t num_replicas() const { return replicas_; }

 private:
  const LayerShape shape_;
  const Planner planner_;
  CallSite post_;
  CallSite plan_;
  CallSite join_;
  std::atomic<int64_t> wrong_{0};
  std::atomic<int64_t> replicas_{0};
};

// Keeps unread plans on one stream, while programs on another stream of the same GPU post.
void PlanOnTwoStreams();

// A planner as a host function of the stream.
class HostPlan {
 public:
  explicit HostPlan(LayerShape shape);

  // refused: if true, pass operands rejected by the planner.
  Ending Run(Gpu& gpu, int64_t run, bool refused = false);

  int64_t num_wrong() const { return *wrong_; }
  // For a HostPlan destroyed while its calls are queued.
  std::shared_ptr<std::atomic<int64_t>> wrong() const { return wrong_; }

  std::function<void(Program&)> before_execute = nullptr;

 private:
  const LayerShape shape_;
  CallSite plan_;
  const std::shared_ptr<std::atomic<int64_t>> wrong_ = std::make_shared<std::atomic<int64_t>>(0);
};

}  // namespace moe_lb::testing
