// Runs a planner's kernel on fibers, a block after the other.
#pragma once

#include "ffi/planning/device/fibers.h"

namespace moe_lb::device {

// `Planner` has `Run(t, call, block)`, and a call has blocks() and words(). time: of the longest block.
template <template <typename, int> class Planner, typename Call>
void RunOnFibers(Fibers& fibers, const Call& call, BlockTime* time = nullptr) {
  for (int block = 0; block < call.blocks() && fibers.faults().empty(); ++block) {
    fibers.Run([&](const FiberThreads& t) {
      switch (call.words()) {
        case 1:
          return Planner<FiberThreads, 1>::Run(t, call, block);
        case 2:
          return Planner<FiberThreads, 2>::Run(t, call, block);
        default:
          return Planner<FiberThreads, 4>::Run(t, call, block);
      }
    });
    if (time != nullptr && fibers.time().cycles > time->cycles) *time = fibers.time();
  }
}

}  // namespace moe_lb::device
