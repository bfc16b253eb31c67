// SwapEvaluator for up to 64 * W ranks, by a flow starting from the flow of the previous placement.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ffi/common/view.h"
#include "ffi/planning/serving.h"
#include "ffi/planning/swap_evaluator.h"

namespace moe_lb {

template <size_t W>
class FlowEvaluator : public SwapEvaluator<W> {
 public:
  // Starts without replicas and with limit 0. slots: replicas per rank. `tokens` [E] must outlive this object.
  FlowEvaluator(View<const int32_t> tokens, size_t num_ranks, size_t slots);

  bool Keeps(const Swap& swap, int32_t threshold) override;
  void Commit(const Swap& swap) override;
  void Place(uint32_t expert, uint32_t rank) override;
  void SetLimit(int32_t limit) override;
  int32_t MaxLoad() override;

 private:
  using SwapEvaluator<W>::worst_;
  using SwapEvaluator<W>::cut_;

  void Apply(const Swap& swap);  // to trial_
  // Offloads all ranks as far as possible; returns the tokens above the limit, or more than `enough` of them. stuck:
  // gets the ranks that cannot be offloaded and those they reach.
  int64_t Offload(Serving& serving, int64_t enough, RankSet<W>* stuck) const;
  void FindCut();  // of now_
  void Compact();  // now_, when it has no entry left

  size_t capacity_;
  Serving now_;
  Serving trial_;
  int32_t mean_ = 0;  // rounded up: no maximum is lower
  int32_t limit_ = 0;
};

extern template class FlowEvaluator<1>;
extern template class FlowEvaluator<2>;
extern template class FlowEvaluator<4>;
extern template class FlowEvaluator<16>;

}  // namespace moe_lb
