// Queues the copies of all devices of a rendezvous, on the thread of the last device to arrive.
#include <cuda_runtime_api.h>

#include <exception>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "ffi/transport/peer_site_cuda.h"

namespace moe_lb::peer_cuda {
namespace {

Status CopyOneByOne(const std::vector<void*>& to, const std::vector<const void*>& from,
                    const std::vector<size_t>& sizes, cudaStream_t stream) {
  for (size_t i = 0; i < to.size(); ++i) {
    // With unified addressing, the runtime derives both devices from the pointers.
    MOE_LB_CUDA(cudaMemcpyAsync(to[i], from[i], sizes[i], cudaMemcpyDefault, stream));
  }
  return Ok();
}

// Read sources in stream order, because only events order their writes before the copies. The attribute has no default:
// the call fails without it.
constexpr int kSourceOrderStream = 1;
// A hint: prefer copy engines, which leave the multiprocessors to concurrent GEMMs.
constexpr unsigned kPreferOverlap = 1;

// A batch is unordered, which is safe: pieces of a task neither write nor read what another one writes.
Status CopyBatch(std::vector<void*> to, std::vector<const void*> from, std::vector<size_t> sizes, cudaStream_t stream) {
  if (to.empty()) return Ok();
  const DriverCalls& driver = DriverCalls::Get();
  if (driver.CheckBatches()) return CopyOneByOne(to, from, sizes, stream);
  BatchAttributes attributes = {kSourceOrderStream, {}, kPreferOverlap};
  size_t first = 0, refused = 0;
  // The driver takes addresses as integers of the same size, and writes to none of the arrays.
  static_assert(sizeof(CUdeviceptr) == sizeof(void*));
  auto* const targets = reinterpret_cast<CUdeviceptr*>(to.data());
  auto* const sources = reinterpret_cast<CUdeviceptr*>(from.data());
  const CUresult result =
      driver.memcpy_batch != nullptr
          ? driver.memcpy_batch(targets, sources, sizes.data(), to.size(), &attributes, &first, 1, stream)
          : driver.memcpy_batch_first(targets, sources, sizes.data(), to.size(), &attributes, &first, 1, &refused,
                                      stream);
  if (result != CUDA_ERROR_NOT_SUPPORTED) return driver.Error(result, "cuMemcpyBatchAsync");
  return CopyOneByOne(to, from, sizes, stream);
}

// Queues tasks in order. By then, weights are computed and slots are free on all devices: every host thread has waited
// for tables fetched after them. So no stream waits for `ready`. A task follows its dependencies, so an event is always
// recorded before a stream waits for it: a wait for an unrecorded event would have no effect.
class Queue {
 public:
  Queue(View<CallArguments> arguments, const PeerTable& table, const std::vector<PeerTask>& tasks)
      : arguments_(arguments),
        table_(table),
        tasks_(tasks),
        done_(tasks.size(), nullptr),
        needed_(tasks.size(), false) {}

  Status Run() {
    for (const PeerTask& task : tasks_) {
      for (const size_t before : task.after) needed_[before] = true;
    }
    for (size_t i = 0; i < tasks_.size(); ++i) {
      if (Status bad = Add(i)) return bad;
    }
    // `copy_join` of an owner also waits for the readers of its weights. XLA may reuse their memory after the owner's
    // stream has passed the join, and cannot see the readers' streams.
    for (size_t owner = 0; owner < arguments_.size(); ++owner) {
      for (size_t reader = 0; reader < arguments_.size(); ++reader) {
        if (reader != owner && reads_.count({reader, owner}) == 0) continue;
        arguments_[owner].pending->awaited.push_back(arguments_[reader].resources);
      }
    }
    return Ok();
  }

 private:
  Status Add(size_t index) {
    const PeerTask& task = tasks_[index];
    const size_t reader = table_.participant(task.to_rank);
    const CallArguments& to = arguments_[reader];
    const cudaStream_t stream = to.resources->gpu->copies();
    MOE_LB_CUDA(cudaSetDevice(to.resources->gpu->device()));
    for (const PeerPiece& piece : task.pieces) {
      if (piece.source != PeerSource::kZeros) reads_.insert({reader, table_.participant(piece.from_rank)});
    }
    for (const size_t before : task.after) MOE_LB_CUDA(cudaStreamWaitEvent(stream, done_[before], 0));
    if (Status bad = QueueTask(table_, task, stream)) return bad;
    return needed_[index] ? Record(index, to) : Ok();
  }

  Status Record(size_t index, const CallArguments& to) {
    auto& forwards = to.resources->forwards;
    size_t& used = num_forwards_[to.resources.get()];
    if (used == forwards.size()) forwards.emplace_back();
    Event& event = forwards[used++];
    // An event belongs to the current device at its creation, which must be the device of the recording stream.
    if (Status bad = event.Make()) return bad;
    MOE_LB_CUDA(cudaEventRecord(event.get(), to.resources->gpu->copies()));
    done_[index] = event.get();
    return Ok();
  }

  const View<CallArguments> arguments_;
  const PeerTable& table_;
  const std::vector<PeerTask>& tasks_;
  std::vector<cudaEvent_t> done_;              // of each task awaited by another one
  std::vector<bool> needed_;                   // tasks awaited by another one
  std::set<std::pair<size_t, size_t>> reads_;  // (reader, owner)
  std::map<const LaunchResources*, size_t> num_forwards_;
};

Status CopyAll(View<CallArguments> arguments) {
  std::vector<PeerShare> shares;
  for (const CallArguments& one : arguments) shares.push_back(one.share);
  if (Status bad = CheckEqualTables(shares)) return bad;
  std::vector<PeerTask> tasks;
  if (Status bad = PlanTasks(shares[0], &tasks)) return bad;
  const PeerTable table(std::move(shares));
  return Queue(arguments, table, tasks).Run();
}

// Call it after all tasks are queued: `copied` then marks the end of all copies into a device.
Status RecordCopied(View<CallArguments> arguments) {
  Status bad;
  for (const CallArguments& one : arguments) {
    const Gpu& gpu = *one.resources->gpu;
    Status failed = Cuda(cudaSetDevice(gpu.device()), "cudaSetDevice");
    if (!failed) failed = Cuda(cudaEventRecord(one.resources->copied.get(), gpu.copies()), "cudaEventRecord of copies");
    if (!bad) bad = failed;
  }
  return bad;
}

// After a failure, part of the copies may be queued, and XLA frees the program's buffers: every device waits for the
// copies of all.
void WaitForAll(View<CallArguments> arguments) {
  for (const CallArguments& one : arguments) {
    one.pending->awaited.clear();
    for (const CallArguments& other : arguments) one.pending->awaited.push_back(other.resources);
  }
}

}  // namespace

Status QueueTask(const PeerTable& table, const PeerTask& task, cudaStream_t stream) {
  std::vector<void*> to;
  std::vector<const void*> from;
  std::vector<size_t> sizes;
  for (const PeerPiece& piece : task.pieces) {
    if (piece.source == PeerSource::kZeros) {
      MOE_LB_CUDA(cudaMemsetAsync(table.To(task, piece), 0, piece.size, stream));
      continue;
    }
    to.push_back(table.To(task, piece));
    from.push_back(table.From(piece));
    sizes.push_back(piece.size);
  }
  return CopyBatch(std::move(to), std::move(from), std::move(sizes), stream);
}

// Runs on the thread of a device's copies, which sets its device for every call.
void Copy(View<CallArguments> arguments, const CallRendezvous::Finish& finish) {
  Status bad;
  try {
    bad = CopyAll(arguments);
  } catch (const std::exception& error) {
    // The rendezvous would end while the copies queued so far run.
    bad = Problem(error.what(), true);
  }
  const Status failed = RecordCopied(arguments);
  if (!bad) bad = failed;
  if (bad) WaitForAll(arguments);
  finish(bad);
}

}  // namespace moe_lb::peer_cuda
