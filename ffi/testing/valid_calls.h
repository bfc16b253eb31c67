// Generators of valid calls of each handler.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "ffi/testing/random_calls.h"

namespace moe_lb::testing {

// Returns an error message for one device's results; empty if they are valid.
using Verifier = std::function<std::string(const Attributes&, const Operands&, const std::vector<Array>& rets)>;

struct ValidCalls {
  std::function<Call(Random&)> make;  // makes a random call that must succeed
  bool blocks = false;                // the handler blocks for the other devices, so each needs a thread
  Verifier verify = nullptr;          // called after each successful call
};

// Valid calls by the handler's name. A handler without an entry fails the fuzz: add one in the file of its part.
const std::map<std::string, ValidCalls>& AllValidCalls();

// Valid calls of each part, in the file of its name.
std::map<std::string, ValidCalls> ValidPlannerCalls();
std::map<std::string, ValidCalls> ValidExchangeCalls();
std::map<std::string, ValidCalls> ValidCopyCalls();
std::map<std::string, ValidCalls> ValidPlannedCopyCalls();
std::map<std::string, ValidCalls> ValidGemmCalls();

}  // namespace moe_lb::testing
