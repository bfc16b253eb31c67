#include "ffi/transport/mapped_memory_cuda.h"

#include <cuda_runtime_api.h>

#include <cstring>

#include "ffi/transport/gpu_cuda.h"

namespace moe_lb::peer_cuda {
namespace {

CUdeviceptr AsDevice(const void* address) { return static_cast<CUdeviceptr>(reinterpret_cast<uintptr_t>(address)); }

// Fills the note for other processes to map an allocation. Memory of cudaMalloc has a handle of its own. Memory
// mapped to addresses, as by XLA's newer allocators, is passed as a file descriptor.
Status Export(CUdeviceptr begin, PeerNote* note, Descriptor* descriptor) {
  const DriverCalls& driver = DriverCalls::Get();
  CUmemGenericAllocationHandle handle = 0;
  if (driver.retain(&handle, reinterpret_cast<void*>(begin)) == CUDA_SUCCESS) {
    int number = -1;
    const CUresult exported = driver.export_handle(&number, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    static_cast<void>(driver.release(handle));
    *descriptor = Descriptor(number);
    return driver.Error(exported, "cuMemExportToShareableHandle");
  }
  cudaIpcMemHandle_t classic = {};
  MOE_LB_CUDA(cudaIpcGetMemHandle(&classic, reinterpret_cast<void*>(begin)));
  static_assert(sizeof classic <= sizeof note->handle);
  std::memcpy(note->handle, &classic, sizeof classic);
  return Ok();
}

}  // namespace

// ---- memory of this process --------------------------------------------------------

// Finds the allocation of an array.
Status SharedMemory::Locate(const void* array, Allocation* allocation, SharedArray* shared) const {
  const DriverCalls& driver = DriverCalls::Get();
  CUdeviceptr begin = 0;
  size_t size = 0;
  unsigned long long id = 0;
  MOE_LB_DRIVER("cuMemGetAddressRange", driver.address_range(&begin, &size, AsDevice(array)));
  MOE_LB_DRIVER("cuPointerGetAttribute", driver.pointer_attribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, begin));
  *allocation = {begin, size, {}};
  *shared = {id, AsDevice(array) - begin};
  return Ok();
}

SocketResult SharedMemory::Share(const void* array, const std::vector<int64_t>& processes, double timeout_s,
                                 SharedArray* shared) {
  *shared = {0, 0};
  if (array == nullptr) return {};
  Allocation located;
  if (Status bad = Locate(array, &located, shared)) return {SocketOutcome::kBroken, bad};
  const std::lock_guard<std::mutex> lock(mutex_);
  Allocation& allocation = allocations_.try_emplace(shared->memory, located).first->second;
  for (const int64_t process : processes) {
    if (process == neighbours_->own() || allocation.known_to.count(process) > 0) continue;
    // Notices of freed memory precede the memory allocated in its place.
    SocketResult sent = SendFreed(process, timeout_s);
    if (!sent.problem) sent = Send(shared->memory, allocation, process, timeout_s);
    if (sent.problem) return sent;
    allocation.known_to.insert(process);
  }
  return {};
}

SocketResult SharedMemory::Send(uint64_t id, const Allocation& allocation, int64_t process, double timeout_s) {
  PeerNote note;
  Descriptor descriptor;
  note.kind = PeerNote::kMemory;
  note.id = id;
  note.size = allocation.size;
  if (Status bad = Export(allocation.begin, &note, &descriptor)) return {SocketOutcome::kBroken, bad, process};
  return neighbours_->Send(process, note, descriptor.get(), timeout_s);
}

// Sends the notices to a process in order; those not sent remain.
SocketResult SharedMemory::SendFreed(int64_t process, double timeout_s) {
  std::vector<uint64_t>& ids = freed_[process];
  for (; !ids.empty(); ids.erase(ids.begin())) {
    PeerNote note;
    note.kind = PeerNote::kGone;
    note.id = ids.front();
    const SocketResult sent = neighbours_->Send(process, note, -1, timeout_s);
    // An ended process needs no notice.
    if (sent.problem && sent.outcome != SocketOutcome::kEnded) return sent;
  }
  return {};
}

void SharedMemory::ForgetFreed() {
  const DriverCalls& driver = DriverCalls::Get();
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto one = allocations_.begin(); one != allocations_.end();) {
    unsigned long long id = 0;
    // Fails for freed memory; memory allocated there again has another number.
    const CUresult asked = driver.pointer_attribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, one->second.begin);
    if (asked == CUDA_SUCCESS && id == one->first) {
      ++one;
      continue;
    }
    for (const int64_t process : one->second.known_to) freed_[process].push_back(one->first);
    one = allocations_.erase(one);
  }
  for (const auto& [process, ids] : freed_) static_cast<void>(SendFreed(process, 0));
}

Status CheckShareable(const void* array, int device) {
  const DriverCalls& driver = DriverCalls::Get();
  if (Status bad = driver.CheckBetweenProcesses()) return bad;
  CUdeviceptr begin = 0;
  size_t size = 0;
  const OnDevice on_device(device);
  if (on_device.bad()) return on_device.bad();
  MOE_LB_DRIVER("cuMemGetAddressRange", driver.address_range(&begin, &size, AsDevice(array)));
  PeerNote note;
  Descriptor descriptor;
  if (Status bad = Export(begin, &note, &descriptor)) return bad;
  // XLA's pool allocates regions of 2 MiB or more and frees none. A smaller one is an array alone, freed with it, which
  // CUDA does not allow while others have it open (cudaIpcOpenMemHandle).
  constexpr size_t kSmallestRegion = 2 << 20;
  if (descriptor || size >= kSmallestRegion) return Ok();
  return Refuse("the allocator frees memory of cudaMalloc array by array; expected a pool, as by default");
}

// ---- memory of others --------------------------------------------------------------

Status MappedAllocation::Map(const PeerNote& note, const Descriptor& descriptor, int device) {
  size_ = note.size;
  if (!descriptor) {
    cudaIpcMemHandle_t handle;
    std::memcpy(&handle, note.handle, sizeof handle);
    void* mapped = nullptr;
    MOE_LB_CUDA(cudaIpcOpenMemHandle(&mapped, handle, cudaIpcMemLazyEnablePeerAccess));
    begin_ = static_cast<std::byte*>(mapped);
    return Ok();
  }
  const DriverCalls& driver = DriverCalls::Get();
  CUmemGenericAllocationHandle handle = 0;
  MOE_LB_DRIVER("cuMemImportFromShareableHandle",
                driver.import_handle(&handle, reinterpret_cast<void*>(static_cast<intptr_t>(descriptor.get())),
                                     CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  const Status bad = MapHandle(handle, device);
  // The mapping keeps the memory alive.
  static_cast<void>(driver.release(handle));
  return bad;
}

Status MappedAllocation::MapHandle(CUmemGenericAllocationHandle handle, int device) {
  const DriverCalls& driver = DriverCalls::Get();
  MOE_LB_DRIVER("cuMemAddressReserve", driver.reserve(&reserved_, size_, 0, 0, 0));
  MOE_LB_DRIVER("cuMemMap", driver.map(reserved_, size_, 0, handle, 0));
  is_mapped_ = true;
  CUmemAccessDesc access = {};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  MOE_LB_DRIVER("cuMemSetAccess", driver.set_access(reserved_, size_, &access, 1));
  begin_ = reinterpret_cast<std::byte*>(reserved_);
  return Ok();
}

MappedAllocation::~MappedAllocation() {
  const DriverCalls& driver = DriverCalls::Get();
  if (reserved_ == 0) {
    if (begin_ != nullptr) static_cast<void>(cudaIpcCloseMemHandle(begin_));
    return;
  }
  if (is_mapped_) static_cast<void>(driver.unmap(reserved_, size_));
  static_cast<void>(driver.free_address(reserved_, size_));
}

Status MappedMemory::Find(int64_t process, const SharedArray& array, size_t bytes, int device, double timeout_s,
                          const std::byte** here) {
  *here = nullptr;
  if (array.memory == 0) return Ok();
  const std::lock_guard<std::mutex> lock(mutex_);
  auto found = mapped_.find({process, array.memory});
  if (found == mapped_.end()) {
    PeerNote note;
    Descriptor descriptor;
    if (Status bad = neighbours_->Await(process, PeerNote::kMemory, array.memory, timeout_s,
                                        "memory that it has not sent", &note, &descriptor)) {
      return bad;
    }
    // The notes of freed memory precede the note of memory at the same place.
    DropGoneLocked();
    auto fresh = std::make_unique<MappedAllocation>();
    if (Status bad = fresh->Map(note, descriptor, device)) {
      return At("memory of process " + std::to_string(process), *bad);
    }
    found = mapped_.emplace(std::pair(process, array.memory), std::move(fresh)).first;
  }
  const MappedAllocation& memory = *found->second;
  if (bytes > memory.size() || array.offset > memory.size() - bytes) {
    return Problem("process " + std::to_string(process) + " has named " + std::to_string(bytes) + " bytes from byte " +
                       std::to_string(array.offset) + " of " + std::to_string(memory.size()),
                   true);
  }
  *here = memory.begin() + array.offset;
  return Ok();
}

void MappedMemory::DropGone() {
  const std::lock_guard<std::mutex> lock(mutex_);
  DropGoneLocked();
}

// Memory of an ended process stays mapped: copies of it may be in flight.
void MappedMemory::DropGoneLocked() {
  for (auto one = mapped_.begin(); one != mapped_.end();) {
    PeerNote note;
    Descriptor none;
    const auto& [process, memory] = one->first;
    const bool is_gone = neighbours_->Take(process, PeerNote::kGone, memory, &note, &none);
    one = is_gone ? mapped_.erase(one) : std::next(one);
  }
}

}  // namespace moe_lb::peer_cuda
