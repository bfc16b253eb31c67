#include "ffi/common/status.h"

#include <sstream>

namespace moe_lb {

void MessagePart::WriteTo(std::ostream& out) const {
  switch (kind_) {
    case Kind::kText:
      out << text_;
      return;
    case Kind::kReal:
      out << real_;
      return;
    case Kind::kSigned:
      out << integer_;
      return;
    case Kind::kUnsigned:
      out << static_cast<uint64_t>(integer_);
      return;
  }
}

Status RefuseWith(std::initializer_list<MessagePart> parts) {
  std::ostringstream message;
  for (const MessagePart& part : parts) part.WriteTo(message);
  return Problem(message.str());
}

}  // namespace moe_lb
