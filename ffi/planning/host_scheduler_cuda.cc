#include "ffi/planning/host_scheduler_cuda.h"

#include <chrono>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "ffi/planning/slot_ring.h"

namespace moe_lb {

namespace xf = xla::ffi;

xf::TypeId HostScheduler::id = {};

namespace {

// A program queues a call per layer. This many may be queued before the launching thread waits.
constexpr size_t kNumSlots = 32;
// Longer than any step: a device that finishes no call in this time is stuck.
constexpr std::chrono::seconds kPatience(120);

xf::Error Check(cudaError_t error, const char* name, const char* what) {
  if (error == cudaSuccess) return xf::Error::Success();
  return xf::Error::Internal(std::string(name) + ": " + what + ": " + cudaGetErrorName(error) + ": " +
                             cudaGetErrorString(error));
}

// One call while it is queued. Lives in its slot until the slot's event says that the copies back are done.
struct Job {
  PlannerCall call;
  Operands operands;  // pinned copies of call.operands
  Results results;    // pinned copies of call.results
  int32_t* status;    // pinned
};

// Runs on a thread of the driver, which allows no call of CUDA and lets no exception pass. The status word is all that
// reaches the program; the reason goes to stderr.
void CUDART_CB RunJob(void* argument) noexcept {
  const Job& job = *static_cast<const Job*>(argument);
  const Status bad = Attempt(job.call, job.operands, job.results);
  *job.status = bad ? 1 : 0;
  if (bad) std::fprintf(stderr, "%s: %s\n", job.call.name, bad->c_str());
}

template <typename T>
size_t NumWords(const std::vector<MatrixView<T>>& arrays) {
  size_t words = 0;
  for (const auto& array : arrays) words += array.rows() * array.columns();
  return words;
}

size_t NumWords(const PlannerCall& call) { return NumWords(call.operands) + NumWords(call.results) + 1; }

// The arrays, one after another in `memory`, which moves past them.
template <typename T>
std::vector<MatrixView<T>> Lay(const std::vector<MatrixView<T>>& arrays, int32_t*& memory) {
  std::vector<MatrixView<T>> laid;
  for (const auto& array : arrays) {
    laid.emplace_back(memory, array.rows(), array.columns());
    memory += array.rows() * array.columns();
  }
  return laid;
}

template <typename T>
cudaError_t Copy(View<int32_t> to, View<T> from, cudaMemcpyKind kind, cudaStream_t stream) {
  // An array without entries may be a null pointer.
  if (from.size() == 0) return cudaSuccess;
  return cudaMemcpyAsync(to.data(), from.data(), from.size() * sizeof(int32_t), kind, stream);
}

}  // namespace

// The slots of the call sites of one size on one device.
class PlannerRing {
 public:
  explicit PlannerRing(size_t words) : words_(words), slots_(kNumSlots), jobs_(kNumSlots), done_(kNumSlots, nullptr) {}

  ~PlannerRing() {
    // Memory that the device may still write is kept for ever.
    if (!slots_.Drain([this](size_t slot) { return IsFinished(slot); }, kPatience)) {
      for (auto& job : jobs_) static_cast<void>(job.release());
      return;
    }
    // A process that ends may have closed CUDA already, and nothing is left to be told.
    for (cudaEvent_t event : done_) {
      if (event != nullptr) static_cast<void>(cudaEventDestroy(event));
    }
    if (memory_ != nullptr) static_cast<void>(cudaFreeHost(memory_));
  }

  PlannerRing(const PlannerRing&) = delete;
  PlannerRing& operator=(const PlannerRing&) = delete;

  xf::Error Allocate(const char* name) {
    void* memory = nullptr;
    // The memory is pinned, because with other memory these copies would make the launching thread wait for the stream.
    const cudaError_t allocated = cudaHostAlloc(&memory, kNumSlots * words_ * sizeof(int32_t), cudaHostAllocDefault);
    if (xf::Error bad = Check(allocated, name, "cudaHostAlloc"); bad.failure()) return bad;
    memory_ = static_cast<int32_t*>(memory);
    for (cudaEvent_t& event : done_) {
      const cudaError_t created = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
      if (xf::Error bad = Check(created, name, "cudaEventCreateWithFlags"); bad.failure()) return bad;
    }
    return xf::Error::Success();
  }

  xf::Error Enqueue(cudaStream_t stream, PlannerCall call, int32_t* status, int device) {
    if (NumWords(call) != words_) return xf::Error::Internal(std::string(call.name) + ": sizes changed between calls");
    const auto slot = slots_.Reserve([this](size_t slot) { return IsFinished(slot); }, kPatience);
    if (!slot) {
      return xf::Error(xf::ErrorCode::kDeadlineExceeded,
                       std::string(call.name) + ": none of " + std::to_string(kNumSlots) + " calls queued on device " +
                           std::to_string(device) + " finished within " + std::to_string(kPatience.count()) +
                           " s; expected the device to make progress");
    }
    return Fill(*slot, stream, std::move(call), status);
  }

 private:
  // Any answer but "not ready" means that the device will not touch the slot again.
  bool IsFinished(size_t slot) const { return cudaEventQuery(done_[slot]) != cudaErrorNotReady; }

  xf::Error Fill(size_t slot, cudaStream_t stream, PlannerCall call, int32_t* status) {
    int32_t* memory = memory_ + slot * words_;
    Operands operands = Lay(call.operands, memory);
    Results results = Lay(call.results, memory);
    // The job that the slot had before is destroyed here, and never by the host function, which could then free memory
    // or call CUDA on the driver's thread.
    jobs_[slot] = std::make_unique<Job>(Job{std::move(call), std::move(operands), std::move(results), memory});
    const xf::Error queued = Queue(*jobs_[slot], stream, status);
    // The event is recorded after an error too, as some of the work may be queued already and will use the slot.
    const xf::Error recorded = Check(cudaEventRecord(done_[slot], stream), jobs_[slot]->call.name, "cudaEventRecord");
    if (recorded.failure()) {
      // Nothing can tell when the device is done with this slot.
      slots_.Retire(slot);
    } else {
      slots_.Launch(slot);
    }
    return queued.failure() ? queued : recorded;
  }

  static xf::Error Queue(Job& job, cudaStream_t stream, int32_t* status) {
    const char* name = job.call.name;
    for (size_t i = 0; i < job.operands.size(); ++i) {
      // The views of operands are read-only for planners; this is where the pinned copies are made.
      const View<const int32_t> pinned = job.operands[i].flat();
      const View<int32_t> to(const_cast<int32_t*>(pinned.data()), pinned.size());
      const cudaError_t copied = Copy(to, job.call.operands[i].flat(), cudaMemcpyDeviceToHost, stream);
      if (xf::Error bad = Check(copied, name, "copy of an operand to the host"); bad.failure()) return bad;
    }
    if (xf::Error bad = Check(cudaLaunchHostFunc(stream, RunJob, &job), name, "cudaLaunchHostFunc"); bad.failure()) {
      return bad;
    }
    for (size_t i = 0; i < job.results.size(); ++i) {
      const cudaError_t copied =
          Copy(job.call.results[i].flat(), job.results[i].flat(), cudaMemcpyHostToDevice, stream);
      if (xf::Error bad = Check(copied, name, "copy of a result to the device"); bad.failure()) return bad;
    }
    const cudaError_t copied =
        Copy(View<int32_t>(status, 1), View<int32_t>(job.status, 1), cudaMemcpyHostToDevice, stream);
    return Check(copied, name, "copy of the status word to the device");
  }

  const size_t words_;  // int32, of a slot
  SlotRing slots_;
  std::vector<std::unique_ptr<Job>> jobs_;
  std::vector<cudaEvent_t> done_;  // recorded after a slot's last copy
  int32_t* memory_ = nullptr;      // pinned
};

namespace {

// The ring of all call sites with calls of that size, until the last of them is gone.
xf::Error SharedRing(int device, size_t words, std::shared_ptr<PlannerRing>* ring) {
  struct All {
    std::mutex mutex;
    std::map<std::pair<int, size_t>, std::weak_ptr<PlannerRing>> by_size;
  };
  // Leaked on purpose: programs may still run while the process exits and destroys its static objects.
  static All* const all = new All;
  const std::lock_guard<std::mutex> lock(all->mutex);
  std::weak_ptr<PlannerRing>& shared = all->by_size[{device, words}];
  *ring = shared.lock();
  if (*ring != nullptr) return xf::Error::Success();
  auto fresh = std::make_shared<PlannerRing>(words);
  if (xf::Error bad = fresh->Allocate("planner"); bad.failure()) return bad;
  shared = fresh;
  *ring = std::move(fresh);
  return xf::Error::Success();
}

}  // namespace

HostScheduler::HostScheduler() = default;
HostScheduler::~HostScheduler() = default;

xf::Error HostScheduler::Prepare(size_t words) {
  int device = 0;
  if (xf::Error bad = Check(cudaGetDevice(&device), "planner", "cudaGetDevice"); bad.failure()) return bad;
  const std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<PlannerRing>& ring = rings_[device];
  return ring != nullptr ? xf::Error::Success() : SharedRing(device, words, &ring);
}

xf::Error HostScheduler::Enqueue(cudaStream_t stream, PlannerCall call, int32_t* status) {
  int device = 0;
  if (xf::Error bad = Check(cudaGetDevice(&device), call.name, "cudaGetDevice"); bad.failure()) return bad;
  PlannerRing* ring = nullptr;
  {
    // The lock is for the map alone: Enqueue may wait for its device, and must not hold up the others meanwhile.
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = rings_.find(device);
    if (found == rings_.end() || found->second == nullptr) {
      return xf::Error::Internal(std::string(call.name) + ": no memory was allocated before the program ran");
    }
    ring = found->second.get();
  }
  return ring->Enqueue(stream, std::move(call), status, device);
}

}  // namespace moe_lb
