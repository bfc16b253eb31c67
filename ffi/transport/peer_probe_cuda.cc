#include "ffi/transport/peer_probe_cuda.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ffi/transport/gpu_cuda.h"
#include "ffi/transport/mapped_memory_cuda.h"

namespace moe_lb::peer_cuda {
namespace {

// Sets `is_late` if the copy has not ended within the time-out: it may still read the mapped memory.
Status TryOne(MappedMemory* mapped, int64_t process, const SharedArray& array, int device, double timeout_s,
              bool* is_late) {
  const std::byte* here = nullptr;
  if (Status bad = mapped->Find(process, array, sizeof(int32_t), device, timeout_s, &here)) return bad;
  Gpu* gpu = nullptr;
  std::shared_ptr<LaunchResources> resources;
  if (Status bad = Gpu::Current(&gpu)) return bad;
  if (Status bad = gpu->Take(1, &resources)) return bad;
  *resources->host = -1;
  MOE_LB_CUDA(cudaMemcpyAsync(resources->host, here, sizeof(int32_t), cudaMemcpyDeviceToHost, gpu->fetches()));
  MOE_LB_CUDA(cudaEventRecord(resources->tables.get(), gpu->fetches()));
  if (Status bad = resources->tables.Await(timeout_s, is_late)) return bad;
  if (*is_late) return Refuse("the copy did not end within ", timeout_s, " s; expected the device to make progress");
  if (*resources->host == process) return Ok();
  return Problem("copied " + std::to_string(*resources->host) + "; expected " + std::to_string(process), true);
}

// Keeps memory mapped until the process ends, as a late copy may still read it.
void KeepMapped(std::unique_ptr<MappedMemory> mapped) {
  static std::mutex* const mutex = new std::mutex;
  static auto* const kept = new std::vector<std::unique_ptr<MappedMemory>>;
  const std::lock_guard<std::mutex> lock(*mutex);
  kept->push_back(std::move(mapped));
}

}  // namespace

Status TryPeers(const std::vector<int64_t>& processes, const void* array, int device, double timeout_s) {
  Neighbours& neighbours = Neighbours::OfProcess();
  const OnDevice on_device(device);
  if (on_device.bad()) return on_device.bad();
  SharedMemory shared(&neighbours);
  auto mapped = std::make_unique<MappedMemory>(&neighbours);
  SharedArray own;
  if (const SocketResult sent = shared.Share(array, processes, timeout_s, &own); sent.problem) return sent.problem;
  PeerNote note;
  note.kind = PeerNote::kProbe;
  static_assert(sizeof own <= sizeof note.handle);
  std::memcpy(note.handle, &own, sizeof own);
  for (const int64_t process : processes) {
    if (process == neighbours.own()) continue;
    if (const SocketResult sent = neighbours.Send(process, note, -1, timeout_s); sent.problem) return sent.problem;
  }
  for (const int64_t process : processes) {
    if (process == neighbours.own()) continue;
    SharedArray other;
    Descriptor none;
    Status bad = neighbours.Await(process, PeerNote::kProbe, 0, timeout_s, "no array to try", &note, &none);
    std::memcpy(&other, note.handle, sizeof other);
    bool is_late = false;
    if (!bad) bad = TryOne(mapped.get(), process, other, device, timeout_s, &is_late);
    if (is_late) KeepMapped(std::move(mapped));
    if (bad)
      return At("device " + std::to_string(device) + " cannot copy from process " + std::to_string(process), *bad);
  }
  return Ok();
}

Status CheckPeerAccess() {
  int count = 0;
  // Without a device there is no pair.
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return Ok();
  }
  for (int device = 0; device < count; ++device) {
    for (int peer = 0; peer < count; ++peer) {
      int can = 0;
      if (peer == device) continue;
      MOE_LB_CUDA(cudaDeviceCanAccessPeer(&can, device, peer));
      if (can == 0) return Refuse("device ", device, " has no peer access to device ", peer);
    }
  }
  return Ok();
}

}  // namespace moe_lb::peer_cuda
