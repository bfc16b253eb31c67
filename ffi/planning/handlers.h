#pragma once

#include <cstdint>
#include <string>

#include "ffi/common/registrations.h"

namespace moe_lb {

// The planners on this platform; one definition per platform.
Registrations PlanningRegistrations();

// The planners of GPUs that run as kernels, without the host: `moe_lb_plan_<name>_kernel`, and whether a call fits.
Registrations PlanningKernelRegistrations();
bool ExactKernelFits(int64_t ranks, int64_t experts, int64_t slots, int64_t domain, double eps, bool localize);
// planner: greedy, ultraep, feplb or relay; false for others.
bool KernelFits(const std::string& planner, int64_t ranks, int64_t experts, int64_t slots, int64_t domain);

}  // namespace moe_lb
