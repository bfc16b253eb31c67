#pragma once

#include "ffi/common/status.h"

namespace moe_lb {

// Nothing, or why the custom calls cannot run with this machine's driver. Where there is no driver nothing is wrong:
// programs are then compiled for other machines.
Status CheckDriver();

}  // namespace moe_lb
