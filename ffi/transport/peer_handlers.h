#pragma once

#include "ffi/common/registrations.h"

namespace moe_lb {

// Peer copies (`copy_start`, `copy_join`, ...) on this platform; one definition per platform.
Registrations PeerRegistrations();

}  // namespace moe_lb
