// Starts of threads, which fail if the process has as many as it may have.
#pragma once

#include <string>
#include <system_error>

#include "ffi/common/status.h"

namespace moe_lb {

// Calls a function that starts a thread. No exception passes a handler, or the end of another thread.
template <typename Start>
Status StartThread(Start start) {
  try {
    start();
  } catch (const std::system_error& error) {
    return Problem(std::string("no thread could be started: ") + error.what(), true);
  }
  return Ok();
}

}  // namespace moe_lb
