#include "ffi/testing/valid_calls.h"

namespace moe_lb::testing {

const std::map<std::string, ValidCalls>& AllValidCalls() {
  // Never destroyed: a failed test exits while other threads may still make calls.
  static const auto* const all = [] {
    auto* const calls = new std::map<std::string, ValidCalls>;
    for (const auto& part :
         {ValidPlannerCalls(), ValidExchangeCalls(), ValidCopyCalls(), ValidPlannedCopyCalls(), ValidGemmCalls()}) {
      calls->insert(part.begin(), part.end());
    }
    return calls;
  }();
  return *all;
}

}  // namespace moe_lb::testing
