// SwapEvaluator for up to 64 ranks, by a flow starting from the flow of the previous placement.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ffi/common/view.h"
#include "ffi/planning/serving.h"
#include "ffi/planning/swap_evaluator.h"

namespace moe_lb {

class FlowEvaluator : public SwapEvaluator {
 public:
  static constexpr size_t kMaxRanks = 64;

  // Starts without replicas and with limit 0. slots: replicas per rank. `tokens` [E] must outlive this object.
  FlowEvaluator(View<const int32_t> tokens, size_t num_ranks, size_t slots);

  bool Keeps(const Swap& swap, int32_t threshold) override;
  void Commit(const Swap& swap) override;
  void SetLimit(int32_t limit) override;
  int32_t MaxLoad() override;

 private:
  void Apply(const Swap& swap);  // to trial_
  void FindCut();                // of now_
  void Compact();                // now_, when it has no entry left

  size_t capacity_;
  Serving now_;
  Serving trial_;
  int32_t mean_ = 0;  // rounded up: no maximum is lower
  int32_t limit_ = 0;
};

}  // namespace moe_lb
