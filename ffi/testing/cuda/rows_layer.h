// A layer copying token rows between ranks, on stand-in GPUs.
#pragma once

#include <atomic>
#include <cstdint>

#include "ffi/testing/cuda/layer_weights.h"

namespace moe_lb::testing {

// `copy_rows`, a wave, `copy_join`.
class RowsLayer {
 public:
  // back: if true, copy from takers to homes.
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

}  // namespace moe_lb::testing
