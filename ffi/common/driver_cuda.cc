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

// 0 without a driver.
int Driver() {
  int driver = 0;
  return cudaDriverGetVersion(&driver) == cudaSuccess ? driver : 0;
}

}  // namespace

Status CheckDriver() {
  const int driver = Driver();
  if (driver == 0) return Ok();
  // The runtime is linked statically. It runs with every driver of its own major version or newer.
  if (driver / 1000 >= CUDART_VERSION / 1000) return Ok();
  return Refuse("the driver here is for CUDA ", Dotted(driver), " and the custom calls were built with CUDA ",
                Dotted(CUDART_VERSION), "; expected a newer driver, or a build with the toolkit of CUDA ",
                driver / 1000);
}

Status CheckKernels(bool has_code) {
  const int driver = Driver();
  if (driver == 0 || driver >= CUDART_VERSION || has_code) return Ok();
  return Refuse("kernels of planners were compiled by CUDA ", Dotted(CUDART_VERSION),
                " for no particular GPU, and the ", "driver here is for CUDA ", Dotted(driver),
                ", so that planners run on the host; expected a newer driver, ",
                "or a build with JAX_MOE_LB_CUDA_ARCHITECTURES");
}

std::string DriverVersion() {
  const int driver = Driver();
  return driver == 0 ? "" : "CUDA " + Dotted(driver);
}

}  // namespace moe_lb
