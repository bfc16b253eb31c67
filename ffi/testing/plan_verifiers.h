// Invariants of plans, verified after each successful call. A verifier takes the planner's attributes, arguments and
// results, and returns an error message, empty if the results are valid.
#pragma once

#include <string>
#include <vector>

#include "ffi/testing/handler_calls.h"

namespace moe_lb::testing {

// Of placement [R, S] and quota [E, R]: filled slots stay; new experts are of the rank's domain and on it once; the
// tokens of each expert are conserved and served by ranks holding it; the maximum load of each domain does not rise.
std::string VerifyEdit(const Attributes& attributes, const Operands& call, const std::vector<Array>& rets);

// The same of tokens [E] and placement, for a planner splitting the tokens itself.
std::string VerifyFill(const Attributes& attributes, const Operands& call, const std::vector<Array>& rets);

// The same of counts [R, E], for a planner also making the placement.
std::string VerifyExact(const Attributes& attributes, const Operands& call, const std::vector<Array>& rets);

// The same of several plans of the same counts, one after the other.
std::string VerifyExactKernel(const Attributes& attributes, const Operands& call, const std::vector<Array>& rets);

// Of placement [R, S]: a replica copies from home, or from a rank holding the expert that copies from home.
std::string VerifyRelay(const Attributes& attributes, const Operands& call, const std::vector<Array>& rets);

// Of rows [R, R] and ticks [N]: each row is on one rail, and none between domains on a dead one.
std::string VerifySpray(const Attributes& attributes, const Operands& call, const std::vector<Array>& rets);

}  // namespace moe_lb::testing
