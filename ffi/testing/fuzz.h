// Fuzz test of handlers with valid, broken and arbitrary calls: each must succeed or return an error with a message.
// Build with sanitizers (JAX_MOE_LB_SANITIZER=address,undefined or thread): buffers have exactly their size.
#pragma once

#include <cstdint>

#include "ffi/common/registrations.h"

namespace moe_lb::testing {

// Main function of a test fuzzing one part of the library.
//   (no arguments)            20,000 cases, a quarter of it under ThreadSanitizer, `without_sanitizers` without one
//   CASES [SEED [CASE]]       CASE: only this case, printed
//   repeat [CALLS]            memory, file descriptors and threads stay flat (not with sanitizers: they keep it)
// A failure is printed with its seed and case number. The test also fails for a handler whose broken calls always
// succeed, or never do, and for a handler without an entry in AllValidCalls.
int FuzzMain(const Registrations& part, int argc, char** argv, uint64_t without_sanitizers = 100000);

}  // namespace moe_lb::testing
