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

// A program queues a call per layer. Up to this many are queued before the launching thread blocks.
constexpr size_t kNumSlots = 32;
// Longer than any step: a device without a completed call in this time is stuck.
constexpr std::chrono::seconds kPatience(120);

xf::Error Check(cudaError_t error, const char* name, const char* what) {
  if (error == cudaSuccess) return xf::Error::Success();
  return xf::Error::Internal(std::string(name) + ": " + what + ": " + cudaGetErrorName(error) + ": " +
                             cudaGetErrorString(error));
}

// One queued call. Lives in its slot until the slot's event marks the copies back as complete.
struct Job {
  PlannerCall call;
  Operands operands;  // pinned copies of call.operands
  Results results;    // pinned copies of call.results
  int32_t* status;    // pinned
};

// Runs on a thread of the driver, which allows no CUDA call and no exception. The status word reports the failure to
// the program; the reason goes to stderr.
void CUDART_CB RunJob(void* argument) noexcept {
  const Job& job = *static_cast<const Job*>(argument);
  const Status bad = Attempt(job.call, job.operands, job.results);
  *job.status = bad ? 1 : 0;
  if (bad) std::fprintf(stderr, "%s: %s\n", job.call.name, bad->c_str());
}

size_t NumWords(const PlannerCall& call) { return NumWords(call.operands) + NumWords(call.results) + 1; }

// Views of the arrays, one after another in `memory`, which advances past them.
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
  // An empty array may be a null pointer.
  if (from.size() == 0) return cudaSuccess;
  return cudaMemcpyAsync(to.data(), from.data(), from.size() * sizeof(int32_t), kind, stream);
}

}  // namespace

// The slots of the call sites of one size on one device.
class PlannerRing {
 public:
  explicit PlannerRing(size_t words) : words_(words), slots_(kNumSlots), jobs_(kNumSlots), done_(kNumSlots, nullptr) {}

  ~PlannerRing() {
    // Leak memory, because the device may still write to it.
    if (!slots_.Drain([this](size_t slot) { return IsFinished(slot); }, kPatience)) {
      for (auto& job : jobs_) static_cast<void>(job.release());
      return;
    }
    // The errors are ignored: CUDA may already be shut down when the process exits.
    for (cudaEvent_t event : done_) {
      if (event != nullptr) static_cast<void>(cudaEventDestroy(event));
    }
    if (memory_ != nullptr) static_cast<void>(cudaFreeHost(memory_));
  }

  PlannerRing(const PlannerRing&) = delete;
  PlannerRing& operator=(const PlannerRing&) = delete;

  xf::Error Allocate(const char* name) {
    void* memory = nullptr;
    // Pinned, because copies with pageable memory block the launching thread until the stream completes them.
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
  // Any result but "not ready" means that the device no longer uses the slot.
  bool IsFinished(size_t slot) const { return cudaEventQuery(done_[slot]) != cudaErrorNotReady; }

  xf::Error Fill(size_t slot, cudaStream_t stream, PlannerCall call, int32_t* status) {
    int32_t* memory = memory_ + slot * words_;
    Operands operands = Lay(call.operands, memory);
    Results results = Lay(call.results, memory);
    // Destroy the previous job of the slot here and never in the host function, where its destructor could free memory
    // or call CUDA on the driver's thread.
    jobs_[slot] = std::make_unique<Job>(Job{std::move(call), std::move(operands), std::move(results), memory});
    const xf::Error queued = Queue(*jobs_[slot], stream, status);
    // Record the event after an error too, because part of the work may be queued and will use the slot.
    const xf::Error recorded = Check(cudaEventRecord(done_[slot], stream), jobs_[slot]->call.name, "cudaEventRecord");
    if (recorded.failure()) {
      // The end of the device's work on this slot cannot be detected.
      slots_.Retire(slot);
    } else {
      slots_.Launch(slot);
    }
    return queued.failure() ? queued : recorded;
  }

  static xf::Error Queue(Job& job, cudaStream_t stream, int32_t* status) {
    const char* name = job.call.name;
    for (size_t i = 0; i < job.operands.size(); ++i) {
      // Operands are read-only views for planners; the pinned copies are made here.
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

// Returns the ring shared by all call sites with calls of this size; it is destroyed with the last of them.
xf::Error SharedRing(int device, size_t words, std::shared_ptr<PlannerRing>* ring) {
  struct All {
    std::mutex mutex;
    std::map<std::pair<int, size_t>, std::weak_ptr<PlannerRing>> by_size;
  };
  // Leaked on purpose: programs may still run while the process destroys its static objects.
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
    // The lock covers only the map: Enqueue may wait for its device, and must not block the other devices.
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
