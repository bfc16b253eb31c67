#pragma once

#include "ffi/common/status.h"

namespace moe_lb {

// Return a failure if the custom calls cannot run with this machine's driver. Without a driver it succeeds, because
// programs may be compiled for other machines.
Status CheckDriver();

}  // namespace moe_lb
