// Handlers with calls that are valid, broken or arbitrary: success or an error with a message, and nothing else. Build
// it with sanitizers (JAX_MOE_LB_SANITIZER=address,undefined or thread): buffers have exactly their size.
#pragma once

#include <cstdint>

#include "ffi/common/registrations.h"

namespace moe_lb::testing {

// The main function of a test that fuzzes one part of the library.
//   (no arguments)            40,000 cases, a quarter of it under ThreadSanitizer, `without_sanitizers` without one
//   CASES [SEED [CASE]]       CASE: only that one, printed
//   repeat [CALLS]            memory, file descriptors and threads stay flat (sanitizers keep what is freed: not there)
// What fails is printed with its seed and number. A handler whose other than valid calls never succeed, or are never
// refused, fails the test, as does one without an entry in AllValidCalls.
int FuzzMain(const Registrations& part, int argc, char** argv, uint64_t without_sanitizers = 100000);

}  // namespace moe_lb::testing
