// Layers of a model on played GPUs: all that a program does around the handlers, and whether the values are right.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ffi/testing/cuda/gpu_program.h"

namespace moe_lb::testing {

struct LayerShape {
  int64_t ranks = 4;
  int64_t home = 3;                        // experts of a rank
  int64_t slots = 2;                       // for replicas
  std::vector<int64_t> widths = {96, 24};  // bf16 of an expert, by kind of weights
  double timeout_s = 30;
  std::vector<int64_t> processes;  // of the ranks; empty: all are devices of this process

  int64_t experts() const { return ranks * home; }
};

// Expert of each slot and the rank it comes from, as the handlers take them.
struct CopyTables {
  std::vector<int32_t> wanted;
  std::vector<int32_t> relay;
};
// The same on all devices for the same run. With relays, slot 0 of all ranks travels from rank to rank.
CopyTables TablesOf(const LayerShape& shape, int64_t run, bool relays);

// What goes between the calls; nothing by default.
struct Between {
  int64_t wave_us = 0;       // what the GPU computes beside the copies
  bool blocks_host = false;  // XLA waits for it, as it does for a loop
  bool fails = false;        // the program fails there
  bool other_home = false;   // XLA has computed the home weights again, elsewhere
};

// `copy_start`, a wave, `copy_join`.
class CopyLayer {
 public:
  CopyLayer(LayerShape shape, bool relays);

  // One execution on one device; how it ended. Values are compared on the GPU's stream.
  Ending Run(Gpu& gpu, int64_t rank, int64_t run, const Between& between = {});
  // One of a program with several layers, in which all copies are begun before the first is joined.
  static Ending RunAll(const std::vector<CopyLayer*>& layers, Gpu& gpu, int64_t rank, int64_t run);

  int64_t num_wrong() const { return wrong_; }

 private:
  struct Copies;

  Copies Add(Program& program, int64_t rank, int64_t run);
  void Join(Program& program, const Copies& copies);

  const LayerShape shape_;
  const bool relays_;
  CallSite start_;
  CallSite join_;
  std::atomic<int64_t> wrong_{0};
};

// `copy_post`, a wave, `plan_<planner>_and_copy`, `copy_join`.
class PlannedLayer {
 public:
  enum class Planner { kGreedy, kFeplb };

  explicit PlannedLayer(LayerShape shape, Planner planner = Planner::kGreedy);

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

// `copy_rows`, a wave, `copy_join`.
class RowsLayer {
 public:
  // back: from those who took rows to where they are at home.
  RowsLayer(LayerShape shape, bool back);

  Ending Run(Gpu& gpu, int64_t rank, int64_t run, const Between& between = {});

  int64_t num_wrong() const { return wrong_; }

 private:
  const LayerShape shape_;
  const bool back_;
  CallSite rows_;
  CallSite join_;
  std::atomic<int64_t> wrong_{0};
};

// A planner as a host function of the stream.
class HostPlan {
 public:
  explicit HostPlan(LayerShape shape);

  // `refused`: with numbers that the planner refuses.
  Ending Run(Gpu& gpu, int64_t run, bool refused = false);

  int64_t num_wrong() const { return *wrong_; }
  // For one that is destroyed while its calls are queued.
  std::shared_ptr<std::atomic<int64_t>> wrong() const { return wrong_; }

  std::function<void(Program&)> before_execute = nullptr;

 private:
  const LayerShape shape_;
  CallSite plan_;
  const std::shared_ptr<std::atomic<int64_t>> wrong_ = std::make_shared<std::atomic<int64_t>>(0);
};

}  // namespace moe_lb::testing
