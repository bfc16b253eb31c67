#include "ffi/planning/handlers.h"

namespace moe_lb {

Registrations PlanningRegistrations() { return {}; }

}  // namespace moe_lb
