// Functions of the CUDA driver, looked up when they are first needed: the module is not linked with the driver's
// library, and which of them a driver has is known only where it runs.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <string>

#include "ffi/common/status.h"

namespace moe_lb {

// How a batch of copies is made, laid out as CUmemcpyAttributes, which toolkits before 12.8 do not declare.
struct BatchAttributes {
  int source_order;
  int hints[4];
  unsigned flags;
};

// A null pointer is a function that the driver lacks.
struct DriverCalls {
  // The two forms of the call, of CUDA 13 and of 12.8, which also tells which copy it refused.
  CUresult (*memcpy_batch)(CUdeviceptr*, CUdeviceptr*, size_t*, size_t, BatchAttributes*, size_t*, size_t, CUstream);
  CUresult (*memcpy_batch_first)(CUdeviceptr*, CUdeviceptr*, size_t*, size_t, BatchAttributes*, size_t*, size_t,
                                 size_t*, CUstream);
  decltype(&cuGetErrorName) error_name;

  // Between processes.
  decltype(&cuMemGetAddressRange) address_range;
  decltype(&cuPointerGetAttribute) pointer_attribute;
  decltype(&cuStreamWriteValue32) write_value;
  decltype(&cuStreamWaitValue32) wait_value;
  decltype(&cuMemRetainAllocationHandle) retain;
  decltype(&cuMemExportToShareableHandle) export_handle;
  decltype(&cuMemImportFromShareableHandle) import_handle;
  decltype(&cuMemAddressReserve) reserve;
  decltype(&cuMemAddressFree) free_address;
  decltype(&cuMemMap) map;
  decltype(&cuMemUnmap) unmap;
  decltype(&cuMemSetAccess) set_access;
  decltype(&cuMemRelease) release;

  // Those of this machine's driver.
  static const DriverCalls& Get();

  // Whether there is a driver: programs may be compiled here for other machines.
  bool is_there() const { return error_name != nullptr; }
  // Nothing, or what of it is missing.
  Status CheckBatches() const;
  Status CheckBetweenProcesses() const;

  Status Error(CUresult result, const char* what) const;
};

// Goes on only after success. name: the driver's, of the call.
#define MOE_LB_DRIVER(name, call)                                          \
  do {                                                                     \
    if (Status bad_ = DriverCalls::Get().Error((call), name)) return bad_; \
  } while (false)

}  // namespace moe_lb
