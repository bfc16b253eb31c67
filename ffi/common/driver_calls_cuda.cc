#include "ffi/common/driver_calls_cuda.h"

#include <cuda_runtime_api.h>

#include <string>
#include <utility>

namespace moe_lb {
namespace {

#if CUDA_VERSION >= 12080
static_assert(sizeof(BatchAttributes) == sizeof(CUmemcpyAttributes), "as CUDA lays them out");
#endif

using GetProcAddress = CUresult (*)(const char*, void**, int, cuuint64_t, CUdriverProcAddressQueryResult*);

// Returns cuGetProcAddress of CUDA 12; null without a driver. It finds functions newer than the toolkit of the build,
// which cudaGetDriverEntryPoint does not.
GetProcAddress FindGetProcAddress() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult how = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuGetProcAddress", &found, 12000, cudaEnableDefault, &how);
#else
  const cudaError_t error = cudaGetDriverEntryPoint("cuGetProcAddress", &found, cudaEnableDefault, &how);
#endif
  if (error == cudaSuccess && how == cudaDriverEntryPointSuccess) return reinterpret_cast<GetProcAddress>(found);
  static_cast<void>(cudaGetLastError());  // not an error of anybody's call
  return nullptr;
}

// Finds the function as of CUDA `version`; null if the driver is older or lacks it.
template <typename Function>
void Look(GetProcAddress get, const char* name, int version, Function* function) {
  void* found = nullptr;
  CUdriverProcAddressQueryResult how = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  if (get(name, &found, version, CU_GET_PROC_ADDRESS_DEFAULT, &how) != CUDA_SUCCESS) return;
  if (how == CU_GET_PROC_ADDRESS_SUCCESS) *function = reinterpret_cast<Function>(found);
}

}  // namespace

DriverCalls DriverCalls::Find() {
  DriverCalls calls = {};
  const GetProcAddress get = FindGetProcAddress();
  if (get == nullptr) return calls;
  Look(get, "cuMemcpyBatchAsync", 13000, &calls.memcpy_batch);
  if (calls.memcpy_batch == nullptr) Look(get, "cuMemcpyBatchAsync", 12080, &calls.memcpy_batch_first);
  Look(get, "cuGetErrorName", 6000, &calls.error_name);
  Look(get, "cuMemGetAddressRange", 3020, &calls.address_range);
  Look(get, "cuPointerGetAttribute", 4000, &calls.pointer_attribute);
  // As of 12.0: the older versions require a driver setting.
  Look(get, "cuStreamWriteValue32", 12000, &calls.write_value);
  Look(get, "cuStreamWaitValue32", 12000, &calls.wait_value);
  Look(get, "cuMemRetainAllocationHandle", 11000, &calls.retain);
  Look(get, "cuMemExportToShareableHandle", 10020, &calls.export_handle);
  Look(get, "cuMemImportFromShareableHandle", 10020, &calls.import_handle);
  Look(get, "cuMemAddressReserve", 10020, &calls.reserve);
  Look(get, "cuMemAddressFree", 10020, &calls.free_address);
  Look(get, "cuMemMap", 10020, &calls.map);
  Look(get, "cuMemUnmap", 10020, &calls.unmap);
  Look(get, "cuMemSetAccess", 10020, &calls.set_access);
  Look(get, "cuMemRelease", 10020, &calls.release);
  return calls;
}

const DriverCalls& DriverCalls::Get() {
  static const DriverCalls calls = Find();
  return calls;
}

Status DriverCalls::CheckBatches() const {
  if (memcpy_batch != nullptr || memcpy_batch_first != nullptr) return Ok();
  return Refuse("the driver here has no cuMemcpyBatchAsync, so that copies are queued one by one; CUDA 12.8 has it");
}

Status DriverCalls::CheckBetweenProcesses() const {
  const std::pair<const char*, bool> all[] = {
      {"cuMemGetAddressRange", address_range != nullptr},
      {"cuPointerGetAttribute", pointer_attribute != nullptr},
      {"cuStreamWriteValue32", write_value != nullptr},
      {"cuStreamWaitValue32", wait_value != nullptr},
      {"cuMemRetainAllocationHandle", retain != nullptr},
      {"cuMemExportToShareableHandle", export_handle != nullptr},
      {"cuMemImportFromShareableHandle", import_handle != nullptr},
      {"cuMemAddressReserve", reserve != nullptr},
      {"cuMemAddressFree", free_address != nullptr},
      {"cuMemMap", map != nullptr},
      {"cuMemUnmap", unmap != nullptr},
      {"cuMemSetAccess", set_access != nullptr},
      {"cuMemRelease", release != nullptr},
  };
  for (const auto& [name, is_there] : all) {
    if (!is_there) return Refuse("the driver here has no ", name, ", so that processes do not copy; CUDA 12 has it");
  }
  return Ok();
}

Status DriverCalls::Error(CUresult result, const char* what) const {
  if (result == CUDA_SUCCESS) return Ok();
  const char* name = nullptr;
  if (error_name == nullptr || error_name(result, &name) != CUDA_SUCCESS) name = "an error without a name";
  return Problem(std::string(what) + ": " + name + " (" + std::to_string(result) + ")", true);
}

}  // namespace moe_lb
