#include "ffi/transport/between_cuda.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "ffi/transport/peer_site_cuda.h"

namespace moe_lb::peer_cuda {
namespace {

// Returns the processes of this process's group, by rank.
Status OwnGroup(const PeerAttributes& attributes, int64_t own, std::vector<int64_t>* processes) {
  const std::vector<int64_t>& all = attributes.processes;
  const auto found = std::find(all.begin(), all.end(), own);
  if (found == all.end()) return Refuse("processes do not name process ", own, "; expected all that run the program");
  const auto size = attributes.num_participants;
  const auto first = all.begin() + (found - all.begin()) / size * size;
  processes->assign(first, first + size);
  return Ok();
}

class Hash {
 public:
  void Add(const void* bytes, size_t size) {
    for (size_t i = 0; i < size; ++i) value_ = (value_ ^ static_cast<const unsigned char*>(bytes)[i]) * 1099511628211u;
  }
  void Add(size_t value) { Add(&value, sizeof value); }
  void Add(MatrixView<const int32_t> table) {
    Add(table.rows());
    Add(table.flat().data(), table.flat().size() * sizeof(int32_t));
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 14695981039346656037u;
};

// Size of an array of one rank, equal on all.
size_t BytesOf(const PeerShare& share, PeerSource source, size_t kind) {
  const PeerWeights& weights = share.weights;
  const size_t read = weights.rows ? weights.rows->read : weights.num_home;
  const size_t written = weights.rows ? weights.rows->written : share.wanted.columns();
  return (source == PeerSource::kHome ? read : written) * weights.expert_bytes[kind];
}

// Hash of the request: site, tables, shapes and sizes, which must be equal on all processes.
uint64_t HashOf(const PeerAttributes& attributes, const PeerShare& share) {
  Hash hash;
  hash.Add(attributes.site.data(), attributes.site.size());
  hash.Add(share.wanted);
  hash.Add(share.relay);
  hash.Add(share.first);
  hash.Add(share.size);
  if (const auto& rows = share.weights.rows) {
    for (const size_t one : {rows->read, rows->written, size_t{rows->back}}) hash.Add(one);
  }
  hash.Add(share.weights.num_home);
  hash.Add(share.weights.chunk_bytes);
  for (const size_t bytes : share.weights.expert_bytes) hash.Add(bytes);
  return hash.value();
}

}  // namespace

// ---- the group ---------------------------------------------------------------------

Between::Between(ProcessGroup* group, int device)
    : group_(group), device_(device), shared_(&group->neighbours()), mapped_(&group->neighbours()) {}

Outcome Between::Of(const PeerAttributes& attributes, Between** between) {
  struct All {
    std::mutex mutex;
    std::map<ProcessGroup*, Between*> by_group;
  };
  // Leaked on purpose, like the groups.
  static All* const all = new All;
  const auto problem = [&](const Status& bad) { return Outcome{At(attributes.site, *bad), false}; };
  Neighbours& neighbours = Neighbours::OfProcess();
  std::vector<int64_t> processes;
  ProcessGroup* group = nullptr;
  int device = 0;
  if (Status bad = DriverCalls::Get().CheckBetweenProcesses()) return problem(bad);
  if (Status bad = OwnGroup(attributes, neighbours.own(), &processes)) return problem(bad);
  if (Status bad = Cuda(cudaGetDevice(&device), "cudaGetDevice")) return problem(bad);
  const Outcome made = ProcessGroup::Of(&neighbours, processes, attributes.site, attributes.timeout_s, &group);
  if (made.failure) return made;
  if (const Outcome outcome = group->WaitForPages(attributes.site, attributes.timeout_s); outcome.failure) {
    return outcome;
  }
  const std::lock_guard<std::mutex> lock(all->mutex);
  Between*& found = all->by_group[group];
  if (found == nullptr) {
    auto fresh = std::unique_ptr<Between>(new Between(group, device));
    if (Status bad = fresh->LockPages()) return problem(bad);
    found = fresh.release();
  }
  if (found->device_ != device) {
    return problem(Refuse("device is ", device, ", and was ", found->device_, " before; expected one GPU a process"));
  }
  *between = found;
  return {};
}

Status Between::LockPages() {
  for (size_t rank = 0; rank < group_->size(); ++rank) {
    void* on_device = nullptr;
    // Streams can write and await only device-accessible memory.
    const cudaError_t locked = cudaHostRegister(group_->page(rank), sizeof(SharedCalls), cudaHostRegisterMapped);
    // An earlier call may have failed at a later page.
    if (locked != cudaErrorHostMemoryAlreadyRegistered) {
      if (Status bad = Cuda(locked, "cudaHostRegister")) return bad;
    }
    MOE_LB_CUDA(cudaHostGetDevicePointer(&on_device, group_->page(rank), 0));
    pages_.push_back(static_cast<CUdeviceptr>(reinterpret_cast<uintptr_t>(on_device)));
  }
  return Ok();
}

CUdeviceptr Between::Word(size_t rank, const std::atomic<uint32_t>& word) const {
  const auto offset = reinterpret_cast<const char*>(&word) - reinterpret_cast<const char*>(group_->page(rank));
  return pages_[rank] + static_cast<CUdeviceptr>(offset);
}

// ---- a call ------------------------------------------------------------------------

Outcome Between::Meet(const PeerAttributes& attributes, const CallArguments& arguments, const Status& refusal) {
  const uint32_t number = arguments.pending->number;
  std::vector<PeerTask> tasks;
  std::vector<PeerShare> shares;
  Outcome outcome = {refusal ? At(attributes.site, *refusal) : Ok(), false};
  const Outcome ring = group_->WaitForRing(attributes.site, number, attributes.timeout_s);
  if (!outcome.failure) outcome = ring;
  if (!outcome.failure) outcome = Prepare(attributes, arguments, &tasks, &shares);
  if (outcome.failure) return Fail(number, outcome, arguments.pending.get());
  const PeerTable table(std::move(shares));
  // `copy_join` also waits for the readers of this rank's weights, because XLA cannot see their streams.
  for (const PeerTask& task : tasks) {
    const size_t reader = table.participant(task.to_rank);
    const auto is_own = [&](const PeerPiece& piece) {
      return piece.source != PeerSource::kZeros && table.participant(piece.from_rank) == group_->own();
    };
    auto& readers = arguments.pending->readers;
    if (reader == group_->own() || std::count(readers.begin(), readers.end(), reader) > 0) continue;
    if (std::any_of(task.pieces.begin(), task.pieces.end(), is_own)) readers.push_back(reader);
  }
  outcome = Queue(attributes, arguments, table, tasks);
  // Also after a failure, because part of the copies may be queued.
  if (Status bad = End(arguments); bad && !outcome.failure) outcome = {At(attributes.site, *bad), false};
  if (outcome.failure) arguments.pending->readers = group_->ShowFailure(number, outcome);
  return outcome;
}

// Runs the call until all ranks agree on the copies.
Outcome Between::Prepare(const PeerAttributes& attributes, const CallArguments& arguments, std::vector<PeerTask>* tasks,
                         std::vector<PeerShare>* shares) {
  const uint32_t number = arguments.pending->number;
  const PeerShare& own = arguments.share;
  const auto problem = [&](const Status& bad) { return Outcome{At(attributes.site, *bad), false}; };
  if (Status bad = PlanTasks(own, tasks)) return problem(bad);
  Announcement announcement;
  announcement.request_hash = HashOf(attributes, own);
  // Before other memory is sent, which may be at the same place.
  shared_.ForgetFreed();
  if (const Outcome shared = Share(attributes, own, &announcement); shared.failure) return shared;
  group_->Announce(number, announcement);
  const Outcome outcome = group_->WaitForAll(attributes.site, number, attributes.timeout_s);
  if (outcome.failure) return outcome;
  // In every call, so that freed memory of others is kept alive no longer than to the next one.
  mapped_.DropGone();
  if (Status bad = MapShares(attributes, arguments, *tasks, shares)) return problem(bad);
  return {};
}

Outcome Between::Share(const PeerAttributes& attributes, const PeerShare& share, Announcement* announcement) {
  if (share.home.size() > SharedCall::kMaxKinds) {
    return {Refuse(attributes.site, ": home has ", share.home.size(), " kinds of weights; expected at most ",
                   SharedCall::kMaxKinds, " between processes"),
            false};
  }
  std::vector<int64_t> others;
  for (size_t rank = 0; rank < group_->size(); ++rank) others.push_back(group_->process(rank));
  for (size_t kind = 0; kind < share.home.size(); ++kind) {
    SharedArray home, slots;
    SocketResult sent = shared_.Share(share.home[kind], others, attributes.timeout_s, &home);
    if (!sent.problem) sent = shared_.Share(share.slots[kind], others, attributes.timeout_s, &slots);
    if (sent.problem) return group_->Unsent(attributes.site, sent);
    announcement->home.push_back(home);
    announcement->slots.push_back(slots);
  }
  return {};
}

// Maps only the sources of this process: other ranks do not wait for it and may have freed the arrays they announced.
Status Between::MapShares(const PeerAttributes& attributes, const CallArguments& arguments,
                          const std::vector<PeerTask>& tasks, std::vector<PeerShare>* shares) {
  shares->assign(group_->size(), arguments.share);
  const PeerTable table(*shares);
  std::set<std::tuple<size_t, PeerSource, size_t>> read;
  for (const PeerTask& task : tasks) {
    if (table.participant(task.to_rank) != group_->own()) continue;
    for (const PeerPiece& piece : task.pieces) {
      if (piece.source != PeerSource::kZeros) {
        read.emplace(table.participant(piece.from_rank), piece.source, piece.kind);
      }
    }
  }
  for (const auto& [rank, source, kind] : read) {
    if (rank == group_->own()) continue;
    const SharedCall& call = group_->call(rank, arguments.pending->number);
    const SharedArray& array = source == PeerSource::kHome ? call.home[kind] : call.slots[kind];
    const std::byte* here = nullptr;
    const size_t bytes = BytesOf(arguments.share, source, kind);
    if (Status bad = mapped_.Find(group_->process(rank), array, bytes, device_, attributes.timeout_s, &here))
      return bad;
    // The table has pointers to non-const, and `Queue` writes only this process's arrays.
    PeerShare& share = (*shares)[rank];
    (source == PeerSource::kHome ? share.home : share.slots)[kind] = const_cast<std::byte*>(here);
  }
  return Ok();
}

// All processes visit the tasks of all in the same order, so the first task not queued does not wait for a task
// that will never be queued.
Outcome Between::Queue(const PeerAttributes& attributes, const CallArguments& arguments, const PeerTable& table,
                       const std::vector<PeerTask>& tasks) {
  const uint32_t number = arguments.pending->number;
  const cudaStream_t stream = arguments.resources->gpu->copies();
  const DriverCalls& driver = DriverCalls::Get();
  const auto problem = [&](const Status& bad) { return Outcome{At(attributes.site, *bad), false}; };
  const auto reader = [&](size_t task) { return table.participant(tasks[task].to_rank); };
  std::vector<bool> is_forwarded(tasks.size(), false);
  for (size_t i = 0; i < tasks.size(); ++i) {
    for (const size_t before : tasks[i].after)
      is_forwarded[before] = is_forwarded[before] || reader(i) != reader(before);
  }
  for (size_t i = 0; i < tasks.size(); ++i) {
    if (reader(i) != group_->own()) continue;
    for (const size_t before : tasks[i].after) {
      // Tasks of this process are ordered by its stream.
      if (reader(before) == group_->own()) continue;
      const Outcome outcome = WaitForTask(attributes, number, reader(before), before, stream);
      if (outcome.failure) return outcome;
    }
    if (Status bad = QueueTask(table, tasks[i], stream)) return problem(bad);
    if (!is_forwarded[i]) continue;
    const CUdeviceptr word = Word(group_->own(), group_->call(group_->own(), number).forwarded);
    const CUresult written = driver.write_value(stream, word, static_cast<uint32_t>(i + 1), 0);
    if (Status bad = driver.Error(written, "cuStreamWriteValue32 of forwarded")) return problem(bad);
    group_->ShowQueued(number, i + 1);
  }
  return {};
}

Outcome Between::WaitForTask(const PeerAttributes& attributes, uint32_t number, size_t rank, size_t task,
                             cudaStream_t stream) const {
  const Outcome outcome = group_->WaitForQueued(attributes.site, number, rank, task, attributes.timeout_s);
  if (outcome.failure) return outcome;
  const DriverCalls& driver = DriverCalls::Get();
  const CUdeviceptr word = Word(rank, group_->call(rank, number).forwarded);
  const CUresult waits = driver.wait_value(stream, word, static_cast<uint32_t>(task + 1), CU_STREAM_WAIT_VALUE_GEQ);
  const Status bad = driver.Error(waits, "cuStreamWaitValue32 for forwarded");
  return {bad ? At(attributes.site, *bad) : Ok(), false};
}

// Set the word first, before XLA's stream passes the join: the process may end then.
Status Between::End(const CallArguments& arguments) const {
  const uint32_t number = arguments.pending->number;
  const LaunchResources& resources = *arguments.resources;
  const DriverCalls& driver = DriverCalls::Get();
  const CUdeviceptr word = Word(group_->own(), group_->call(group_->own(), number).copied);
  Status bad =
      driver.Error(driver.write_value(resources.gpu->copies(), word, number, 0), "cuStreamWriteValue32 of copied");
  // Release the other ranks: the stream will not set the word. After an error, no result of reads here is used.
  if (bad) group_->ShowCopied(number);
  const Status failed =
      Cuda(cudaEventRecord(resources.copied.get(), resources.gpu->copies()), "cudaEventRecord of copies");
  arguments.pending->awaited.push_back(arguments.resources);
  return bad ? bad : failed;
}

Outcome Between::Fail(uint32_t number, Outcome outcome, PendingCall* pending) {
  pending->readers = group_->ShowFailure(number, outcome);
  group_->ShowCopied(number);
  return outcome;
}

Status Between::WaitForReader(cudaStream_t stream, uint32_t number, size_t rank) const {
  const DriverCalls& driver = DriverCalls::Get();
  const CUdeviceptr word = Word(rank, group_->call(rank, number).copied);
  return driver.Error(driver.wait_value(stream, word, number, CU_STREAM_WAIT_VALUE_GEQ), "cuStreamWaitValue32");
}

}  // namespace moe_lb::peer_cuda
