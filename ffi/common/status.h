// A status: empty on success, else a message naming the argument, its value and the expected condition. It is not
// an exception, because neither XLA nor CUDA lets one pass through a handler.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
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

// A text, which it refers to, or a number.
class MessagePart {
 public:
  MessagePart(const char* text) : text_(text) {}
  MessagePart(const std::string& text) : text_(text) {}
  MessagePart(std::string_view text) : text_(text) {}
  template <typename T, typename = std::enable_if_t<std::is_arithmetic_v<T>>>
  MessagePart(T number) {
    if constexpr (std::is_floating_point_v<T>) {
      kind_ = Kind::kReal;
      real_ = number;
    } else {
      kind_ = std::is_signed_v<T> ? Kind::kSigned : Kind::kUnsigned;
      integer_ = static_cast<int64_t>(number);
    }
  }

  void WriteTo(std::ostream& out) const;

 private:
  enum class Kind { kText, kReal, kSigned, kUnsigned };

  Kind kind_ = Kind::kText;
  std::string_view text_;
  double real_ = 0;
  int64_t integer_ = 0;
};

Status RefuseWith(std::initializer_list<MessagePart> parts);

// Refuse("weights of item ", 3, " is ", -1, "; expected at least 0")
// Literals are pointers here: as references, they would make an instance for each length. A stream would be inlined.
template <typename... Parts>
Status Refuse(Parts... parts) {
  return RefuseWith({parts...});
}

// The same problem, prefixed by its place.
inline Status At(const std::string& place, const Problem& problem) {
  return Problem(place + ": " + problem, problem.is_internal);
}

}  // namespace moe_lb
