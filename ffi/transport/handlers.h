#pragma once

#include "ffi/common/registrations.h"

namespace moe_lb {

// The exact-size exchange of rows: CPU only, because XLA implements it for accelerators.
Registrations ExchangeRegistrations();

}  // namespace moe_lb
