// What a valid call of each handler looks like.
#pragma once

#include <functional>
#include <map>
#include <string>

#include "ffi/testing/random_calls.h"

namespace moe_lb::testing {

struct ValidCalls {
  std::function<Call(Random&)> make;  // a random call, which must succeed
  bool blocks = false;                // the handler waits for the other devices: each needs a thread
};

// By the handler's name. A handler without an entry fails the fuzz: write one here.
const std::map<std::string, ValidCalls>& AllValidCalls();

}  // namespace moe_lb::testing
