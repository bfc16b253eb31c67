// A layer starting copies of expert weights and joining them later, on stand-in GPUs.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "ffi/testing/cuda/layer_weights.h"

namespace moe_lb::testing {

// `copy_start`, a wave, `copy_join`.
class CopyLayer {
 public:
  CopyLayer(LayerShape shape, bool relays);

  // Runs one execution on one device and returns its ending. Values are compared on the GPU's stream.
  Ending Run(Gpu& gpu, int64_t rank, int64_t run, const Between& between = {});
  // One execution of a program with several layers, starting all copies before the first join, with a pause of the host
  // after each start.
  static Ending RunAll(const std::vector<CopyLayer*>& layers, Gpu& gpu, int64_t rank, int64_t run,
                       int64_t pause_us = 0);

  int64_t num_wrong() const { return wrong_; }

 private:
  struct Copies;

  Copies Add(Program& program, int64_t rank, int64_t run, const Between& between = {});
  void Join(Program& program, const Copies& copies);

  const LayerShape shape_;
  const bool relays_;
  CallSite start_;
  CallSite join_;
  std::atomic<int64_t> wrong_{0};
};

}  // namespace moe_lb::testing
