// Functions of the driver, and those of the runtime for memory of several processes.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "ffi/testing/cuda/calls.h"
#include "ffi/testing/cuda/memory.h"
#include "ffi/testing/cuda/stand_in.h"
#include "ffi/testing/cuda/streams.h"

namespace moe_lb::testing {
namespace {

constexpr size_t kPage = 4096;

// The page behind an allocation, seen by all processes: how many have it open by a classic handle.
class OpenCount {
 public:
  OpenCount(int descriptor, size_t size)
      : page_(mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, static_cast<off_t>(Offset(size)))) {
    if (page_ == MAP_FAILED) std::abort();
  }
  ~OpenCount() { munmap(page_, kPage); }

  static size_t Offset(size_t size) { return (size + kPage - 1) / kPage * kPage; }
  std::atomic<int32_t>& count() const { return *static_cast<std::atomic<int32_t>*>(page_); }

 private:
  void* page_;
};

struct Opened {
  size_t size;
  int descriptor;
};

struct Memory {
  std::mutex mutex;
  std::vector<Allocation> allocations;
  std::map<const void*, Opened> opened;  // of others, by cudaIpcOpenMemHandle
  std::map<const void*, int> owners;     // devices of memory mapped by cuMemMap
  uint64_t last_id = 0;
};

Memory& TheMemory() {
  static auto* const memory = new Memory;
  return *memory;
}

std::atomic<int64_t> num_mapped{0};
std::atomic<int64_t> num_handles{0};   // retained or imported and not released
std::atomic<int64_t> num_reserved{0};  // ranges of addresses

// Contents of a classic handle: a file of another process.
struct ClassicHandle {
  pid_t process;
  int descriptor;
  size_t size;
};
static_assert(sizeof(ClassicHandle) <= sizeof(cudaIpcMemHandle_t));

CUresult AsResult(cudaError_t error) { return static_cast<CUresult>(error); }

// The device of the memory in a file, which its name contains.
int DeviceOf(int descriptor) {
  char name[256] = {};
  const std::string link = "/proc/self/fd/" + std::to_string(descriptor);
  static_cast<void>(!readlink(link.c_str(), name, sizeof name - 1));
  const char* const digits = std::strstr(name, "of device ");
  return digits == nullptr ? 0 : std::atoi(digits + std::strlen("of device "));
}

// Whether a device of this process can access the memory in a file.
bool CanAccess(int device, int descriptor) {
  return TheStandIn().without_peer_access.count({MachineDevice(device), DeviceOf(descriptor)}) == 0;
}

#define MOE_LB_DRIVER_ENTER(name) \
  if (const cudaError_t bad = Enter(name); bad != cudaSuccess) return AsResult(bad)
#define MOE_LB_DRIVER_ENTER_ORDERING(name) \
  MOE_LB_DRIVER_ENTER(name);               \
  if (IsIgnored(name, __builtin_return_address(0))) return CUDA_SUCCESS

// ---- words -------------------------------------------------------------------------

uint32_t* WordAt(CUdeviceptr address) { return reinterpret_cast<uint32_t*>(address); }

CUresult WriteValue(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned) {
  MOE_LB_DRIVER_ENTER_ORDERING("cuStreamWriteValue32");
  uint32_t* const word = WordAt(address);
  if (!IsPinned(word)) return AsResult(Forbidden(cudaErrorInvalidValue, "cuStreamWriteValue32 to memory not pinned"));
  Launch(stream, [word, value] { __atomic_store_n(word, value, __ATOMIC_RELEASE); });
  return CUDA_SUCCESS;
}

CUresult WaitValue(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
  MOE_LB_DRIVER_ENTER_ORDERING("cuStreamWaitValue32");
  uint32_t* const word = WordAt(address);
  if (!IsPinned(word) || flags != CU_STREAM_WAIT_VALUE_GEQ) {
    return AsResult(Forbidden(cudaErrorInvalidValue, "cuStreamWaitValue32 for memory not pinned, or not for >="));
  }
  Launch(stream, [word, value] {
    // Other processes do not ring the bell.
    while (static_cast<int32_t>(__atomic_load_n(word, __ATOMIC_ACQUIRE) - value) < 0 && !IsCorrupt()) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  });
  return CUDA_SUCCESS;
}

// ---- memory of this process --------------------------------------------------------

CUresult AddressRange(CUdeviceptr* begin, size_t* size, CUdeviceptr address) {
  MOE_LB_DRIVER_ENTER("cuMemGetAddressRange");
  const Allocation found = AllocationOf(reinterpret_cast<const void*>(address));
  if (found.size == 0) return CUDA_ERROR_INVALID_VALUE;
  *begin = reinterpret_cast<CUdeviceptr>(found.begin);
  *size = found.size;
  return CUDA_SUCCESS;
}

CUresult PointerAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr address) {
  MOE_LB_DRIVER_ENTER("cuPointerGetAttribute");
  const Allocation found = AllocationOf(reinterpret_cast<const void*>(address));
  if (found.size == 0 || attribute != CU_POINTER_ATTRIBUTE_BUFFER_ID) return CUDA_ERROR_INVALID_VALUE;
  *static_cast<unsigned long long*>(data) = found.id;
  return CUDA_SUCCESS;
}

// A handle is a file of this process, plus one because 0 is no handle.
CUresult Retain(CUmemGenericAllocationHandle* handle, void* address) {
  MOE_LB_DRIVER_ENTER("cuMemRetainAllocationHandle");
  const Allocation found = AllocationOf(address);
  if (found.size == 0 || found.kind != MemoryKind::kMapped) return CUDA_ERROR_INVALID_VALUE;
  *handle = static_cast<CUmemGenericAllocationHandle>(fcntl(found.descriptor, F_DUPFD_CLOEXEC, 0)) + 1;
  ++num_handles;
  return CUDA_SUCCESS;
}

int FileOf(CUmemGenericAllocationHandle handle) { return static_cast<int>(handle) - 1; }

CUresult Release(CUmemGenericAllocationHandle handle) {
  MOE_LB_DRIVER_ENTER("cuMemRelease");
  close(FileOf(handle));
  --num_handles;
  return CUDA_SUCCESS;
}

CUresult ExportHandle(void* out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                      unsigned long long) {
  MOE_LB_DRIVER_ENTER("cuMemExportToShareableHandle");
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
  *static_cast<int*>(out) = fcntl(FileOf(handle), F_DUPFD_CLOEXEC, 0);
  return CUDA_SUCCESS;
}

// ---- memory of other processes -----------------------------------------------------

CUresult ImportHandle(CUmemGenericAllocationHandle* handle, void* descriptor, CUmemAllocationHandleType) {
  MOE_LB_DRIVER_ENTER("cuMemImportFromShareableHandle");
  const int file = static_cast<int>(reinterpret_cast<intptr_t>(descriptor));
  *handle = static_cast<CUmemGenericAllocationHandle>(fcntl(file, F_DUPFD_CLOEXEC, 0)) + 1;
  ++num_handles;
  return CUDA_SUCCESS;
}

CUresult Reserve(CUdeviceptr* address, size_t size, size_t, CUdeviceptr, unsigned long long) {
  MOE_LB_DRIVER_ENTER("cuMemAddressReserve");
  void* const begin = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  *address = reinterpret_cast<CUdeviceptr>(begin);
  ++num_reserved;
  return begin == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult FreeAddress(CUdeviceptr address, size_t size) {
  MOE_LB_DRIVER_ENTER("cuMemAddressFree");
  munmap(reinterpret_cast<void*>(address), size);
  --num_reserved;
  return CUDA_SUCCESS;
}

// The memory is inaccessible before SetAccess.
CUresult Map(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long) {
  MOE_LB_DRIVER_ENTER("cuMemMap");
  void* const mapped = mmap(reinterpret_cast<void*>(address), size, PROT_NONE, MAP_SHARED | MAP_FIXED, FileOf(handle),
                            static_cast<off_t>(offset));
  if (mapped == MAP_FAILED) return CUDA_ERROR_INVALID_VALUE;
  ++num_mapped;
  const std::lock_guard<std::mutex> lock(TheMemory().mutex);
  TheMemory().owners[mapped] = DeviceOf(FileOf(handle));
  return CUDA_SUCCESS;
}

CUresult Unmap(CUdeviceptr address, size_t size) {
  MOE_LB_DRIVER_ENTER("cuMemUnmap");
  mmap(reinterpret_cast<void*>(address), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  --num_mapped;
  return CUDA_SUCCESS;
}

// CUDA Driver API, Virtual Memory Management, cuMemSetAccess: fails for a device that cannot access the memory's.
CUresult SetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc* access, size_t) {
  MOE_LB_DRIVER_ENTER("cuMemSetAccess");
  {
    const std::lock_guard<std::mutex> lock(TheMemory().mutex);
    const int owner = TheMemory().owners[reinterpret_cast<void*>(address)];
    // The number is this process's, not the exporter's.
    if (access->location.id < 0 || access->location.id >= NumDevices()) return CUDA_ERROR_INVALID_DEVICE;
    const std::pair<int, int> pair(MachineDevice(access->location.id), owner);
    if (TheStandIn().without_peer_access.count(pair) > 0) return CUDA_ERROR_INVALID_DEVICE;
  }
  mprotect(reinterpret_cast<void*>(address), size, PROT_READ | PROT_WRITE);
  return CUDA_SUCCESS;
}

// ---- batches of copies -------------------------------------------------------------

// Attributes of a batch, in CUDA's layout.
struct Attributes {
  int source_order;
  int hints[4];
  unsigned flags;
};

CUresult MemcpyBatch(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count, Attributes* attributes,
                     size_t* firsts, size_t num_attributes, CUstream stream) {
  MOE_LB_DRIVER_ENTER("cuMemcpyBatchAsync");
  if (!TheStandIn().batches_are_supported) return CUDA_ERROR_NOT_SUPPORTED;
  if (stream == nullptr || count == 0 || num_attributes == 0 || num_attributes > count || firsts[0] != 0) {
    return AsResult(Forbidden(cudaErrorInvalidValue, "cuMemcpyBatchAsync with arguments that CUDA refuses"));
  }
  for (size_t i = 0; i < num_attributes; ++i) {
    if (attributes[i].source_order != 1) {
      return AsResult(Forbidden(cudaErrorInvalidValue, "cuMemcpyBatchAsync reads its sources too early"));
    }
    // CUDA Runtime API, cudaMemcpyFlagPreferOverlapWithCompute: without it a copy may use multiprocessors.
    if (attributes[i].flags != 1) {
      return AsResult(Forbidden(cudaErrorInvalidValue, "cuMemcpyBatchAsync does not prefer copy engines"));
    }
  }
  struct Copy {
    void* to;
    const void* from;
    size_t size;
  };
  std::vector<Copy> copies;
  for (size_t i = 0; i < count; ++i) {
    if (sizes[i] == 0) return AsResult(Forbidden(cudaErrorInvalidValue, "cuMemcpyBatchAsync with a copy of no bytes"));
    copies.push_back({reinterpret_cast<void*>(to[i]), reinterpret_cast<const void*>(from[i]), sizes[i]});
  }
  // A batch is unordered, so use an unexpected order.
  std::reverse(copies.begin(), copies.end());
  Launch(stream, [copies = std::move(copies), us = TheStandIn().copy_us] {
    if (us > 0) std::this_thread::sleep_for(std::chrono::microseconds(us));
    for (const Copy& copy : copies) std::memcpy(copy.to, copy.from, copy.size);
  });
  return CUDA_SUCCESS;
}

CUresult MemcpyBatchFirst(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count, Attributes* attributes,
                          size_t* firsts, size_t num_attributes, size_t*, CUstream stream) {
  return MemcpyBatch(to, from, sizes, count, attributes, firsts, num_attributes, stream);
}

CUresult ErrorName(CUresult result, const char** name) {
  *name = cudaGetErrorName(static_cast<cudaError_t>(result));
  return CUDA_SUCCESS;
}

struct EntryPoint {
  const char* name;
  int since;  // the version of CUDA
  void* function;
};

template <typename Function>
EntryPoint Entry(const char* name, int since, Function* function) {
  return {name, since, reinterpret_cast<void*>(function)};
}

CUresult GetProcAddress(const char* name, void** function, int version, cuuint64_t,
                        CUdriverProcAddressQueryResult* how);

const std::vector<EntryPoint>& EntryPoints() {
  static auto* const all = new std::vector<EntryPoint>{
      Entry("cuMemcpyBatchAsync", 13000, MemcpyBatch),
      Entry("cuMemcpyBatchAsync", 12080, MemcpyBatchFirst),
      Entry("cuGetProcAddress", 12000, GetProcAddress),
      Entry("cuGetErrorName", 6000, ErrorName),
      Entry("cuMemGetAddressRange", 3020, AddressRange),
      Entry("cuPointerGetAttribute", 4000, PointerAttribute),
      Entry("cuStreamWriteValue32", 11070, WriteValue),
      Entry("cuStreamWaitValue32", 11070, WaitValue),
      Entry("cuMemRetainAllocationHandle", 11000, Retain),
      Entry("cuMemRelease", 10020, Release),
      Entry("cuMemExportToShareableHandle", 10020, ExportHandle),
      Entry("cuMemImportFromShareableHandle", 10020, ImportHandle),
      Entry("cuMemAddressReserve", 10020, Reserve),
      Entry("cuMemAddressFree", 10020, FreeAddress),
      Entry("cuMemMap", 10020, Map),
      Entry("cuMemUnmap", 10020, Unmap),
      Entry("cuMemSetAccess", 10020, SetAccess),
  };
  return *all;
}

// CUDA Driver API, Driver Entry Point Access, cuGetProcAddress: returns the newest form of a function as of the
// requested version; "if the requested symbol was found but the version is too high" for the driver, it returns
// CUDA_ERROR_NOT_FOUND, as for a missing symbol.
CUresult GetProcAddress(const char* name, void** function, int version, cuuint64_t,
                        CUdriverProcAddressQueryResult* how) {
  *function = nullptr;
  *how = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  if (TheStandIn().missing_functions.count(name) > 0) return CUDA_ERROR_NOT_FOUND;
  for (const EntryPoint& one : EntryPoints()) {
    if (std::strcmp(one.name, name) != 0) continue;
    *how = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
    if (one.since > version || version > TheStandIn().driver_version) continue;
    *function = one.function;
    *how = CU_GET_PROC_ADDRESS_SUCCESS;
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_NOT_FOUND;
}

}  // namespace

Allocation NewAllocation(size_t size, MemoryKind kind, char* at) {
  Allocation made;
  const std::string name = "memory of device " + std::to_string(MachineDevice(CurrentDevice()));
  made.descriptor = memfd_create(name.c_str(), MFD_CLOEXEC);
  const size_t with_count = OpenCount::Offset(size) + kPage;
  if (made.descriptor < 0 || ftruncate(made.descriptor, static_cast<off_t>(with_count)) != 0) std::abort();
  void* const begin =
      mmap(at, size, PROT_READ | PROT_WRITE, MAP_SHARED | (at != nullptr ? MAP_FIXED : 0), made.descriptor, 0);
  if (begin == MAP_FAILED) std::abort();
  made.begin = static_cast<char*>(begin);
  made.size = size;
  made.kind = kind;
  const std::lock_guard<std::mutex> lock(TheMemory().mutex);
  made.id = ++TheMemory().last_id;
  TheMemory().allocations.push_back(made);
  return made;
}

// CUDA Runtime API, Device Management, cudaIpcOpenMemHandle: "Calling cudaFree on an exported memory region before
// calling cudaIpcCloseMemHandle in the importing context will result in undefined behavior." Memory of cuMemCreate
// lives until its last mapping is gone, in any process (Virtual Memory Management, cuMemRelease).
void FreeAllocation(const Allocation& allocation) {
  if (allocation.kind == MemoryKind::kClassic) {
    if (OpenCount(allocation.descriptor, allocation.size).count() > 0) {
      static_cast<void>(Forbidden(cudaSuccess, "memory was freed that another process has open"));
    }
    std::memset(allocation.begin, 0xdd, allocation.size);
  }
  const std::lock_guard<std::mutex> lock(TheMemory().mutex);
  auto& all = TheMemory().allocations;
  const auto is_it = [&](const Allocation& one) { return one.id == allocation.id; };
  all.erase(std::remove_if(all.begin(), all.end(), is_it), all.end());
  munmap(allocation.begin, allocation.size);
  close(allocation.descriptor);
}

Allocation AllocationOf(const void* address) {
  const char* const at = static_cast<const char*>(address);
  const std::lock_guard<std::mutex> lock(TheMemory().mutex);
  for (const Allocation& one : TheMemory().allocations) {
    if (one.begin <= at && at < one.begin + one.size) return one;
  }
  return {};
}

int64_t NumMapped() { return num_mapped; }
int64_t NumHandles() { return num_handles; }
int64_t NumReserved() { return num_reserved; }

}  // namespace moe_lb::testing

// ---- the runtime's functions -------------------------------------------------------

using namespace moe_lb::testing;

extern "C" {

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version, unsigned long long,
                                             cudaDriverEntryPointQueryResult* how) {
  *function = nullptr;
  *how = cudaDriverEntryPointSymbolNotFound;
  if (TheStandIn().driver_version == 0) return cudaErrorInsufficientDriver;
  CUdriverProcAddressQueryResult found;
  static_cast<void>(GetProcAddress(name, function, static_cast<int>(version), 0, &found));
  *how = static_cast<cudaDriverEntryPointQueryResult>(found);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* memory, size_t size, unsigned) {
  if (const cudaError_t bad = Enter("cudaHostRegister"); bad != cudaSuccess) return bad;
  if (IsPinned(memory)) return Fail(cudaErrorHostMemoryAlreadyRegistered);
  AddPinned(memory, size);
  return cudaSuccess;
}

cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  if (const cudaError_t bad = Enter("cudaHostGetDevicePointer"); bad != cudaSuccess) return bad;
  *device = host;
  return IsPinned(host) ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* memory) {
  if (const cudaError_t bad = Enter("cudaIpcGetMemHandle"); bad != cudaSuccess) return bad;
  const Allocation found = AllocationOf(memory);
  // Memory of cudaMallocAsync too: CUDA C++ Programming Guide, Stream Ordered Memory Allocator, IPC: its pool is
  // shared.
  if (found.size == 0 || found.kind != MemoryKind::kClassic || found.begin != memory) {
    return Fail(cudaErrorInvalidValue);
  }
  const ClassicHandle says = {getpid(), found.descriptor, found.size};
  std::memcpy(handle, &says, sizeof says);
  return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t handle, unsigned) {
  if (const cudaError_t bad = Enter("cudaIpcOpenMemHandle"); bad != cudaSuccess) return bad;
  ClassicHandle says;
  std::memcpy(&says, &handle, sizeof says);
  const std::string path = "/proc/" + std::to_string(says.process) + "/fd/" + std::to_string(says.descriptor);
  // CUDA C++ Programming Guide, Interprocess Communication: a handle is for other processes than the one that made it.
  if (says.process == getpid())
    return Forbidden(cudaErrorInvalidResourceHandle, "a handle was opened by its own process");
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return Fail(cudaErrorInvalidResourceHandle);
  // cudaIpcOpenMemHandle, flag cudaIpcMemLazyEnablePeerAccess: fails if cudaDeviceCanAccessPeer says no.
  if (!CanAccess(CurrentDevice(), file)) {
    close(file);
    return Fail(cudaErrorPeerAccessUnsupported);
  }
  *memory = mmap(nullptr, says.size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (*memory == MAP_FAILED) return cudaErrorMemoryAllocation;
  ++OpenCount(file, says.size).count();
  const std::lock_guard<std::mutex> lock(TheMemory().mutex);
  TheMemory().opened[*memory] = {says.size, file};
  ++num_mapped;
  return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void* memory) {
  if (const cudaError_t bad = Enter("cudaIpcCloseMemHandle"); bad != cudaSuccess) return bad;
  const std::lock_guard<std::mutex> lock(TheMemory().mutex);
  const auto found = TheMemory().opened.find(memory);
  if (found == TheMemory().opened.end()) return cudaErrorInvalidValue;
  const Opened& opened = found->second;
  --OpenCount(opened.descriptor, opened.size).count();
  munmap(memory, opened.size);
  close(opened.descriptor);
  TheMemory().opened.erase(found);
  --num_mapped;
  return cudaSuccess;
}

}  // extern "C"
