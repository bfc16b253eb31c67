#pragma once

#include <string>

#include "ffi/common/status.h"

namespace moe_lb {

// Return a failure if the custom calls cannot run with this machine's driver. Without a driver it succeeds, because
// programs may be compiled for other machines.
Status CheckDriver();

// Return a failure if the driver cannot compile the kernels: without machine code for a GPU (`has_code`), they are in
// the language of the toolkit that compiled them, which no older driver reads (CUDA C++ Programming Guide, Binary and
// PTX Compatibility).
Status CheckKernels(bool has_code);

// "CUDA 12.4": the newest version that the driver supports; empty without one.
std::string DriverVersion();

}  // namespace moe_lb
