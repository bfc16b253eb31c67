// Functions of the CUDA driver, looked up at the first use. The module is not linked with the driver's library, and the
// set of available functions depends on the machine.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <string>

#include "ffi/common/status.h"

namespace moe_lb {

// Attributes of a batch of copies, laid out as CUmemcpyAttributes, which toolkits before 12.8 do not declare.
struct BatchAttributes {
  int source_order;
  int hints[4];
  unsigned flags;
};

// Function table; null pointers are functions missing in the driver.
struct DriverCalls {
  // The two forms of the call: CUDA 13, and CUDA 12.8, which also returns the index of the failed copy.
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

  // The table of this machine's driver, looked up once.
  static const DriverCalls& Get();
  static DriverCalls Find();

  // True if a driver is installed. Programs may be compiled for other machines without one.
  bool is_there() const { return error_name != nullptr; }
  // Return a failure naming the missing function.
  Status CheckBatches() const;
  Status CheckBetweenProcesses() const;

  Status Error(CUresult result, const char* what) const;
};

// Returns the failure of a driver call from the enclosing function. name: of the driver function.
#define MOE_LB_DRIVER(name, call)                                          \
  do {                                                                     \
    if (Status bad_ = DriverCalls::Get().Error((call), name)) return bad_; \
  } while (false)

}  // namespace moe_lb
