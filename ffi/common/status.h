// A status is nothing, or says what is wrong with the arguments: it names the argument, the value and what was
// expected. It is no exception, because neither XLA nor CUDA lets one pass through a handler.
#pragma once

#include <optional>
#include <sstream>
#include <string>

namespace moe_lb {

using Status = std::optional<std::string>;

inline Status Ok() { return std::nullopt; }

// Refuse("weights of item ", 3, " is ", -1, "; expected at least 0")
template <typename... Parts>
Status Refuse(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  return message.str();
}

}  // namespace moe_lb
