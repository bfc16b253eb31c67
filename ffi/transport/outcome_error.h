// Converts the outcome of a rendezvous to an XLA error.
#pragma once

#include "ffi/common/handler.h"
#include "ffi/transport/rendezvous.h"

namespace moe_lb {

inline xla::ffi::Error ToError(const Outcome& outcome) {
  return outcome.timed_out ? xla::ffi::Error(xla::ffi::ErrorCode::kDeadlineExceeded, *outcome.failure)
                           : ToError(outcome.failure);
}

}  // namespace moe_lb
