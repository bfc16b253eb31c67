#pragma once

#include "ffi/common/registrations.h"

namespace moe_lb {

// The planners on this platform; one definition per platform.
Registrations PlanningRegistrations();

}  // namespace moe_lb
