#pragma once

#include "ffi/common/registrations.h"

namespace moe_lb {

// The grouped products, on CPUs.
Registrations GemmRegistrations();

}  // namespace moe_lb
