#include "ffi/common/driver_calls_cuda.h"

#include <cuda_runtime_api.h>

#include <string>

namespace moe_lb {
namespace {

#if CUDA_VERSION >= 12080
static_assert(sizeof(BatchAttributes) == sizeof(CUmemcpyAttributes), "as CUDA lays them out");
#endif

// Returns the function as of CUDA `version`; null if the driver or the function is missing.
void* Find(const char* name, unsigned version) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult how = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &how);
#else
  static_cast<void>(version);
  const cudaError_t error = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &how);
#endif
  if (error == cudaSuccess && how == cudaDriverEntryPointSuccess) return found;
  static_cast<void>(cudaGetLastError());  // not an error of anybody's call
  return nullptr;
}

template <typename Function>
void Look(const char* name, unsigned version, Function* function) {
  *function = reinterpret_cast<Function>(Find(name, version));
}

DriverCalls FindAll() {
  DriverCalls calls = {};
#if CUDART_VERSION >= 12050
  Look("cuMemcpyBatchAsync", 13000, &calls.memcpy_batch);
  if (calls.memcpy_batch == nullptr) Look("cuMemcpyBatchAsync", 12080, &calls.memcpy_batch_first);
#endif
  Look("cuGetErrorName", 6000, &calls.error_name);
  Look("cuMemGetAddressRange", 3020, &calls.address_range);
  Look("cuPointerGetAttribute", 4000, &calls.pointer_attribute);
  // As of 12.0: the older versions require a driver setting.
  Look("cuStreamWriteValue32", 12000, &calls.write_value);
  Look("cuStreamWaitValue32", 12000, &calls.wait_value);
  Look("cuMemRetainAllocationHandle", 11000, &calls.retain);
  Look("cuMemExportToShareableHandle", 10020, &calls.export_handle);
  Look("cuMemImportFromShareableHandle", 10020, &calls.import_handle);
  Look("cuMemAddressReserve", 10020, &calls.reserve);
  Look("cuMemAddressFree", 10020, &calls.free_address);
  Look("cuMemMap", 10020, &calls.map);
  Look("cuMemUnmap", 10020, &calls.unmap);
  Look("cuMemSetAccess", 10020, &calls.set_access);
  Look("cuMemRelease", 10020, &calls.release);
  return calls;
}

}  // namespace

const DriverCalls& DriverCalls::Get() {
  static const DriverCalls calls = FindAll();
  return calls;
}

Status DriverCalls::CheckBatches() const {
  if (memcpy_batch != nullptr || memcpy_batch_first != nullptr) return Ok();
  return Refuse("the driver here has no cuMemcpyBatchAsync, so that copies are queued one by one; CUDA 12.8 has it");
}

Status DriverCalls::CheckBetweenProcesses() const {
  const bool has_all = address_range != nullptr && pointer_attribute != nullptr && write_value != nullptr &&
                       wait_value != nullptr && retain != nullptr && export_handle != nullptr &&
                       import_handle != nullptr && reserve != nullptr && free_address != nullptr && map != nullptr &&
                       unmap != nullptr && set_access != nullptr && release != nullptr;
  if (has_all) return Ok();
  return Refuse("the driver here lacks functions that map the memory of other processes; CUDA 12 has them");
}

Status DriverCalls::Error(CUresult result, const char* what) const {
  if (result == CUDA_SUCCESS) return Ok();
  const char* name = nullptr;
  if (error_name == nullptr || error_name(result, &name) != CUDA_SUCCESS) name = "an error without a name";
  return Problem(std::string(what) + ": " + name + " (" + std::to_string(result) + ")", true);
}

}  // namespace moe_lb
