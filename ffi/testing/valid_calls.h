// What a valid call of each handler looks like.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "ffi/testing/random_calls.h"

namespace moe_lb::testing {

// What is wrong with one device's results; empty if nothing is.
using Verifier = std::function<std::string(const Attributes&, const Operands&, const std::vector<Array>& rets)>;

struct ValidCalls {
  std::function<Call(Random&)> make;  // a random call, which must succeed
  bool blocks = false;                // the handler waits for the other devices: each needs a thread
  Verifier verify = nullptr;          // of whatever call succeeds
};

// By the handler's name. A handler without an entry fails the fuzz: write one in the file of its part.
const std::map<std::string, ValidCalls>& AllValidCalls();

// The parts, each in a file of its name.
std::map<std::string, ValidCalls> ValidPlannerCalls();
std::map<std::string, ValidCalls> ValidExchangeCalls();
std::map<std::string, ValidCalls> ValidCopyCalls();
std::map<std::string, ValidCalls> ValidPlannedCopyCalls();
std::map<std::string, ValidCalls> ValidGemmCalls();

}  // namespace moe_lb::testing
