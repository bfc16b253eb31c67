#include "ffi/common/driver_cuda.h"

#include <cuda_runtime_api.h>

#include <sstream>

namespace moe_lb {
namespace {

// 12040: "12.4"
std::string Dotted(int version) {
  std::ostringstream text;
  text << version / 1000 << "." << version % 1000 / 10;
  return text.str();
}

}  // namespace

Status CheckDriver() {
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) return Ok();
  // The runtime is linked statically. It runs with every driver of its own major version or newer.
  if (driver / 1000 >= CUDART_VERSION / 1000) return Ok();
  return Refuse("the driver here is for CUDA ", Dotted(driver), " and the custom calls were built with CUDA ",
                Dotted(CUDART_VERSION), "; expected a newer driver, or a build with the toolkit of CUDA ",
                driver / 1000);
}

}  // namespace moe_lb
