// Devices, versions and names of errors of the stand-in for the CUDA runtime.
#include <algorithm>
#include <utility>
#include <vector>

#include "ffi/testing/cuda/calls.h"
#include "ffi/testing/cuda/stand_in.h"

namespace moe_lb::testing {

// CUDA C++ Programming Guide, CUDA Environment Variables, CUDA_VISIBLE_DEVICES: only these devices "are visible to the
// application, and they are enumerated in the order of the sequence".
int NumDevices() {
  const StandIn& options = TheStandIn();
  return options.visible.empty() ? options.num_devices : static_cast<int>(options.visible.size());
}

int MachineDevice(int device) {
  const std::vector<int>& visible = TheStandIn().visible;
  return visible.empty() ? device : visible[static_cast<size_t>(device)];
}

}  // namespace moe_lb::testing

using namespace moe_lb::testing;

extern "C" {

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorNotReady:
      return "cudaErrorNotReady";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorNotSupported:
      return "cudaErrorNotSupported";
    case cudaErrorIllegalAddress:
      return "cudaErrorIllegalAddress";
    case cudaErrorInvalidResourceHandle:
      return "cudaErrorInvalidResourceHandle";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorPeerAccessUnsupported:
      return "cudaErrorPeerAccessUnsupported";
    case cudaErrorStreamCaptureUnsupported:
      return "cudaErrorStreamCaptureUnsupported";
    default:
      return "another error";
  }
}
const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

cudaError_t cudaDriverGetVersion(int* version) {
  MOE_LB_ENTER("cudaDriverGetVersion");
  *version = TheStandIn().driver_version;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  MOE_LB_ENTER("cudaRuntimeGetVersion");
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  MOE_LB_ENTER("cudaGetDeviceCount");
  *count = NumDevices();
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  MOE_LB_ENTER("cudaDeviceCanAccessPeer");
  // CUDA Runtime API, Peer Device Memory Access: the answer is for an ordered pair, and not for a device with itself;
  // cudaErrorInvalidDevice for a device that is not there.
  if (std::min(device, peer) < 0 || std::max(device, peer) >= NumDevices()) return Fail(cudaErrorInvalidDevice);
  const std::pair<int, int> pair(MachineDevice(device), MachineDevice(peer));
  *can = device != peer && TheStandIn().without_peer_access.count(pair) == 0 ? 1 : 0;
  return cudaSuccess;
}

}  // extern "C"
