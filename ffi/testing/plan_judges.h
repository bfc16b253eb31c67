// What every plan must keep, whatever the planner was given: judged after each call that succeeds. A judge gets the
// planner's attributes, arguments and results, and says what is wrong with the results; nothing if nothing is.
#pragma once

#include <string>
#include <vector>

#include "ffi/testing/handler_calls.h"

namespace moe_lb::testing {

// Of placement [R, S] and quota [E, R]: filled slots stay; what is new is of the rank's domain and not there twice; no
// token is lost, and only ranks that hold an expert serve more of it; no domain's highest load rises.
std::string JudgeEdit(const Attributes& attributes, const Operands& call, const std::vector<Array>& rets);

// The same of tokens [E] and placement, where tokens are split anew.
std::string JudgeFill(const Attributes& attributes, const Operands& call, const std::vector<Array>& rets);

// The same of counts [R, E], where everything is new.
std::string JudgeExact(const Attributes& attributes, const Operands& call, const std::vector<Array>& rets);

// Of placement [R, S]: a replica copies from home, or from a rank that does and that holds the expert.
std::string JudgeRelay(const Attributes& attributes, const Operands& call, const std::vector<Array>& rets);

// Of rows [R, R] and ticks [N]: each row is on one rail, and none between domains on a dead one.
std::string JudgeSpray(const Attributes& attributes, const Operands& call, const std::vector<Array>& rets);

}  // namespace moe_lb::testing
