// A status: empty on success, else a message naming the argument, its value and the expected condition. It is not
// an exception, because neither XLA nor CUDA lets one pass through a handler.
#pragma once

#include <optional>
#include <sstream>
#include <string>
#include <utility>

namespace moe_lb {

// Message of a failure.
struct Problem : std::string {
  Problem(std::string words, bool internal = false) : std::string(std::move(words)), is_internal(internal) {}
  Problem(const char* words) : std::string(words), is_internal(false) {}

  bool is_internal;  // caused by the machine or this library, not by an argument
};

using Status = std::optional<Problem>;

inline Status Ok() { return std::nullopt; }

// Refuse("weights of item ", 3, " is ", -1, "; expected at least 0")
template <typename... Parts>
Status Refuse(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  return Problem(message.str());
}

// The same problem, prefixed by its place.
inline Status At(const std::string& place, const Problem& problem) {
  return Problem(place + ": " + problem, problem.is_internal);
}

}  // namespace moe_lb
