#include "ffi/transport/gpu_cuda.h"

#include <algorithm>
#include <map>
#include <string>

namespace moe_lb::peer_cuda {
namespace {

// Whether no stream of XLA's still reads the turn's pinned memory. Any answer but "not ready" says so: after an error
// nothing runs. A fetch that somebody gave up may still write it, and is over before that of the turn's next user,
// which comes after it on the same stream.
bool IsIdle(const Turn& turn) { return cudaEventQuery(turn.uploaded.get()) != cudaErrorNotReady; }

// Few sizes, so that call sites share turns.
size_t Rounded(size_t words) {
  size_t size = 256;
  while (size < words) size *= 2;
  return size;
}

}  // namespace

Status Gpu::Current(Gpu** gpu) {
  struct All {
    std::mutex mutex;
    std::map<int, Gpu*> by_device;
  };
  // They are leaked on purpose: programs may still run while the process exits and destroys its static objects.
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
  // Without the flag a stream would wait for the default stream, and with it for work that has nothing to do with the
  // copies.
  MOE_LB_CUDA(cudaStreamCreateWithFlags(&copies_, cudaStreamNonBlocking));
  MOE_LB_CUDA(cudaStreamCreateWithFlags(&fetches_, cudaStreamNonBlocking));
  return Ok();
}

Status Gpu::Prepare(size_t words) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto fits = [size = Rounded(words)](size_t other) { return Rounded(other) >= size; };
  const auto site = launching_.insert(words);
  const auto sites = std::count_if(launching_.begin(), launching_.end(), fits);
  const auto needed = std::max<std::ptrdiff_t>(sites, kNumTurns);
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
  auto turn = std::make_unique<Turn>();
  turn->gpu = this;
  turn->words = Rounded(words);
  for (Event* event : {&turn->ready, &turn->tables, &turn->copied, &turn->uploaded}) {
    if (Status bad = event->Make()) return bad;
  }
  void* memory = nullptr;
  // The memory is pinned, because a copy to other memory would make the launching thread wait for the stream. It is
  // never freed, as freeing may wait for all devices too.
  MOE_LB_CUDA(cudaHostAlloc(&memory, turn->words * sizeof(int32_t), cudaHostAllocPortable));
  turn->host = static_cast<int32_t*>(memory);
  sizes_.push_back(turn->words);
  free_.push_back(std::move(turn));
  return Ok();
}

Status Gpu::Take(size_t words, std::shared_ptr<Turn>* taken) {
  std::unique_ptr<Turn> turn;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    // The smallest, so that the large ones are there for who needs them; of these, the one that has been free for the
    // longest.
    const auto fits = [words](const auto& free) { return free->words >= words && IsIdle(*free); };
    auto found = free_.end();
    for (auto free = free_.begin(); free != free_.end(); ++free) {
      if ((found == free_.end() || (*free)->words < (*found)->words) && fits(*free)) found = free;
    }
    if (found == free_.end()) {
      if (Status bad = Add(words)) return bad;
      found = free_.end() - 1;
    }
    turn = std::move(*found);
    free_.erase(found);
  }
  *taken = std::shared_ptr<Turn>(turn.release(), [](Turn* used) {
    const std::lock_guard<std::mutex> lock(used->gpu->mutex_);
    used->gpu->free_.emplace_back(used);
  });
  return Ok();
}

}  // namespace moe_lb::peer_cuda
