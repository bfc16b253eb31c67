// jax_moe_lb._ffi_cuda: the custom calls of NVIDIA GPUs, under the same names as those of the CPU.
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "ffi/common/driver_calls_cuda.h"
#include "ffi/common/driver_cuda.h"
#include "ffi/common/module.h"
#include "ffi/planning/handlers.h"
#include "ffi/transport/mapped_memory_cuda.h"
#include "ffi/transport/neighbours_cuda.h"
#include "ffi/transport/peer_handlers.h"
#include "ffi/transport/peer_planning.h"
#include "ffi/transport/peer_probe_cuda.h"

namespace nb = nanobind;
using namespace moe_lb;
using Reason = std::optional<std::string>;

// Without a driver there is no failure.
static Reason MissingFeature(Status (DriverCalls::*check)() const) {
  const DriverCalls& driver = DriverCalls::Get();
  return driver.is_there() ? (driver.*check)() : Ok();
}

// Built without a compiler of device code, planners run on the host.
static std::vector<Registrations> All() {
  std::vector<Registrations> all = {PlanningRegistrations(), PeerRegistrations(), PeerPlanningRegistrations()};
#ifdef MOE_LB_KERNELS
  all.push_back(PlanningKernelRegistrations());
#endif
  return all;
}

#ifdef MOE_LB_KERNELS_HAVE_CODE
static constexpr bool kKernelsHaveCode = true;
#else
static constexpr bool kKernelsHaveCode = false;
#endif

NB_MODULE(_ffi_cuda, module) {
  module.doc() = "XLA custom calls of jax_moe_lb for NVIDIA GPUs; jax_moe_lb.core.custom_calls registers them";
  module.def("registrations", [] { return AsPython(All()); }, "State types and handlers, as capsules");
#ifdef MOE_LB_KERNELS
  module.def("exact_kernel_fits", &ExactKernelFits, nb::arg("ranks"), nb::arg("experts"), nb::arg("slots"),
             nb::arg("domain"), nb::arg("eps"), nb::arg("localize"),
             "Return whether `exact` runs as a kernel for these sizes");
  module.def("kernel_fits", &KernelFits, nb::arg("planner"), nb::arg("ranks"), nb::arg("experts"), nb::arg("slots"),
             nb::arg("domain"), "Return whether another planner runs as a kernel for these sizes");
  module.def(
      "why_no_kernels", []() -> Reason { return CheckKernels(kKernelsHaveCode); },
      "Return the reason if this machine's driver cannot run the kernels of planners, else None");
#endif
  module.def("driver_version", &DriverVersion, "Return the newest CUDA version of this machine's driver, or nothing");
  module.def(
      "why_unusable", []() -> Reason { return CheckDriver(); },
      "Return the reason if the custom calls cannot run with this machine's driver, else None");
  module.def(
      "why_not_batched", [] { return MissingFeature(&DriverCalls::CheckBatches); },
      "Return the reason if copies are not queued in batches, else None");
  module.def(
      "why_not_between_processes", [] { return MissingFeature(&DriverCalls::CheckBetweenProcesses); },
      "Return the reason if the driver cannot map memory of other processes, else None");
  module.def(
      "why_not_shareable",
      [](uintptr_t address, int device) -> Reason {
        return peer_cuda::CheckShareable(reinterpret_cast<const void*>(address), device);
      },
      nb::arg("address"), nb::arg("device"),
      "Return the reason if other processes cannot map the memory at an address, else None");
  module.def(
      "listen",
      [] {
        std::string address;
        if (Status bad = Neighbours::OfProcess().Listen(&address)) throw std::runtime_error(*bad);
        return address;
      },
      "Return the address at which other processes reach this one");
  module.def(
      "connect",
      [](int64_t own, const std::map<int64_t, std::string>& addresses, double timeout_s) -> Reason {
        return Neighbours::OfProcess().Connect(own, addresses, timeout_s);
      },
      nb::arg("own"), nb::arg("addresses"), nb::arg("timeout_s"), nb::call_guard<nb::gil_scoped_release>(),
      "Connect this process to others; return the reason of a failure, else None");
  module.def(
      "try_peers",
      [](const std::vector<int64_t>& processes, uintptr_t address, int device, double timeout_s) -> Reason {
        return peer_cuda::TryPeers(processes, reinterpret_cast<const void*>(address), device, timeout_s);
      },
      nb::arg("processes"), nb::arg("address"), nb::arg("device"), nb::arg("timeout_s"),
      nb::call_guard<nb::gil_scoped_release>(),
      "Copy from each other process of a group, whose int32 holds its number; return the reason of a failure, else "
      "None");
  module.def(
      "why_no_peer_access", []() -> Reason { return peer_cuda::CheckPeerAccess(); },
      "Return the first pair of this process's GPUs without peer access, else None");
}
