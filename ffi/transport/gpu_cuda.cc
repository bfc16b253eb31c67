#include "ffi/transport/gpu_cuda.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <string>
#include <thread>

namespace moe_lb::peer_cuda {
namespace {

// True if XLA's streams have completed their reads of the pinned memory, or an error has stopped them. An abandoned
// fetch may still write the memory; it ends before the fetch of the next user, which follows it on the same stream.
bool IsIdle(const LaunchResources& resources) { return cudaEventQuery(resources.uploaded.get()) != cudaErrorNotReady; }

// Round up to a power of two, so that call sites share launch resources.
size_t Rounded(size_t words) {
  size_t size = 256;
  while (size < words) size *= 2;
  return size;
}

}  // namespace

Status Event::Await(double timeout_s, bool* is_late) const {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point begin = Clock::now();
  for (;;) {
    // Poll, because cudaEventSynchronize has no time-out and would hang the program on a stuck device.
    const cudaError_t state = cudaEventQuery(event_);
    if (state != cudaErrorNotReady) return Cuda(state, "cudaEventQuery");
    const Clock::duration waited = Clock::now() - begin;
    *is_late = waited > std::chrono::duration<double>(timeout_s);
    if (*is_late) return Ok();
    // Yield at first, because a plan is on the critical path; then sleep to free the core.
    if (waited < std::chrono::microseconds(200)) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
}

Status Gpu::Current(Gpu** gpu) {
  struct All {
    std::mutex mutex;
    std::map<int, Gpu*> by_device;
  };
  // Leaked on purpose: programs may still run while the process destroys its static objects.
  static All* const all = new All;
  int device = 0;
  MOE_LB_CUDA(cudaGetDevice(&device));
  const std::lock_guard<std::mutex> lock(all->mutex);
  Gpu*& found = all->by_device[device];
  if (found == nullptr) {
    auto fresh = std::unique_ptr<Gpu>(new Gpu(device));
    if (Status bad = fresh->MakeStreams()) return bad;
    found = fresh.release();
  }
  *gpu = found;
  return Ok();
}

Status Gpu::MakeStreams() {
  // Without the flag a stream synchronizes with the default stream, and so with work unrelated to the copies.
  MOE_LB_CUDA(cudaStreamCreateWithFlags(&copies_, cudaStreamNonBlocking));
  MOE_LB_CUDA(cudaStreamCreateWithFlags(&fetches_, cudaStreamNonBlocking));
  return Ok();
}

Status Gpu::Prepare(size_t words) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto fits = [size = Rounded(words)](size_t other) { return Rounded(other) >= size; };
  const auto site = launching_.insert(words);
  const auto sites = std::count_if(launching_.begin(), launching_.end(), fits);
  const auto needed = std::max<std::ptrdiff_t>(sites, kNumLaunchResources);
  for (auto count = std::count_if(sizes_.begin(), sizes_.end(), fits); count < needed; ++count) {
    Status bad = Add(words);
    if (!bad) continue;
    launching_.erase(site);
    return bad;
  }
  return Ok();
}

void Gpu::Launched(size_t words) {
  const std::lock_guard<std::mutex> lock(mutex_);
  launching_.erase(launching_.find(words));
}

Status Gpu::Add(size_t words) {
  auto resources = std::make_unique<LaunchResources>();
  resources->gpu = this;
  resources->words = Rounded(words);
  for (Event* event : {&resources->ready, &resources->tables, &resources->copied, &resources->uploaded}) {
    if (Status bad = event->Make()) return bad;
  }
  void* memory = nullptr;
  // Pinned, because a copy to pageable memory blocks the launching thread until the stream completes it. Never freed,
  // because freeing may synchronize all devices.
  MOE_LB_CUDA(cudaHostAlloc(&memory, resources->words * sizeof(int32_t), cudaHostAllocPortable));
  resources->host = static_cast<int32_t*>(memory);
  sizes_.push_back(resources->words);
  free_.push_back(std::move(resources));
  return Ok();
}

Status Gpu::Take(size_t words, std::shared_ptr<LaunchResources>* taken) {
  std::unique_ptr<LaunchResources> resources;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    // Take the smallest sufficient one, to leave the large ones for large calls; of these, the one returned first.
    const auto fits = [words](const auto& free) { return free->words >= words && IsIdle(*free); };
    auto found = free_.end();
    for (auto free = free_.begin(); free != free_.end(); ++free) {
      if ((found == free_.end() || (*free)->words < (*found)->words) && fits(*free)) found = free;
    }
    if (found == free_.end()) {
      if (Status bad = Add(words)) return bad;
      found = free_.end() - 1;
    }
    resources = std::move(*found);
    free_.erase(found);
  }
  *taken = std::shared_ptr<LaunchResources>(resources.release(), [](LaunchResources* used) {
    const std::lock_guard<std::mutex> lock(used->gpu->mutex_);
    used->gpu->free_.emplace_back(used);
  });
  return Ok();
}

}  // namespace moe_lb::peer_cuda
