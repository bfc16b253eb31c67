#include "ffi/transport/peer_runner.h"

#include <atomic>
#include <cstring>
#include <memory>
#include <utility>

#include "ffi/transport/copier.h"

namespace moe_lb {
namespace {

// Returns the copier of each rank's device. Call it before the first job: a failure between jobs would free the memory
// of those running.
Status CopiersOf(const PeerTable& table, std::vector<Copier*>* copiers) {
  copiers->resize(table.num_ranks());
  for (size_t rank = 0; rank < copiers->size(); ++rank) {
    if (Status bad = Copiers::Of(table.device(rank), &(*copiers)[rank])) return bad;
  }
  return Ok();
}

// State of a run, alive until the last task is complete.
class Run {
 public:
  Run(std::vector<PeerTask> tasks, PeerTable table, std::vector<Copier*> copiers, std::function<void()> done)
      : tasks_(std::move(tasks)),
        table_(std::move(table)),
        copiers_(std::move(copiers)),
        done_(std::move(done)),
        jobs_(tasks_.size()),
        unlocks_(tasks_.size()),
        num_waiting_(tasks_.size()),
        num_open_(tasks_.size()) {
    for (size_t i = 0; i < tasks_.size(); ++i) {
      jobs_[i].push_back([this, i] { Do(i); });
      num_waiting_[i] = tasks_[i].after.size();
      for (const size_t before : tasks_[i].after) unlocks_[before].push_back(i);
    }
  }

  // Starts the tasks of a run that its caller keeps alive until the return.
  static void Start(const std::shared_ptr<Run>& run) noexcept {
    run->self_ = run;
    run->EnqueueFirst();
  }

 private:
  void EnqueueFirst() noexcept {
    for (size_t i = 0; i < tasks_.size(); ++i) {
      // `num_waiting_` cannot be used here: copiers already decrement it, and a task at 0 would start twice.
      if (tasks_[i].after.empty()) Enqueue(i);
    }
  }

  void Enqueue(size_t task) noexcept {
    // The receiver's copier does the copy, so only one thread writes the slots of a rank.
    copiers_[tasks_[task].to_rank]->Enqueue(std::move(jobs_[task]));
  }

  void Do(size_t task) {
    for (const PeerPiece& piece : tasks_[task].pieces) {
      std::byte* to = table_.To(tasks_[task], piece);
      if (piece.source == PeerSource::kZeros) {
        std::memset(to, 0, piece.size);
      } else {
        std::memcpy(to, table_.From(piece), piece.size);
      }
    }
    for (const size_t next : unlocks_[task]) {
      // The decrement orders memory: the thread reaching 0 sees the copies of all previous tasks, each on its own
      // copier, and may forward them.
      if (--num_waiting_[next] == 0) Enqueue(next);
    }
    if (--num_open_ > 0) return;
    const std::shared_ptr<Run> self = std::move(self_);
    done_();
  }

  const std::vector<PeerTask> tasks_;
  const PeerTable table_;
  const std::vector<Copier*> copiers_;  // by rank
  const std::function<void()> done_;
  std::shared_ptr<Run> self_;                     // until the last task is complete
  std::vector<Copier::Jobs> jobs_;                // the job of each task, until it is enqueued
  std::vector<std::vector<size_t>> unlocks_;      // the tasks waiting for each task
  std::vector<std::atomic<size_t>> num_waiting_;  // number of tasks awaited by each task
  std::atomic<size_t> num_open_;
};

void SumAtHome(MatrixView<const int32_t> wanted, const std::vector<PeerNumber>& numbers, const PeerTable& table,
               size_t rank) {
  const auto replicas = ReplicasOf(wanted, table.weights().num_home, rank);
  for (size_t kind = 0; kind < numbers.size(); ++kind) {
    const size_t count = table.weights().expert_bytes[kind] / BytesOf(numbers[kind]);
    for (size_t index = 0; index < replicas.size(); ++index) {
      std::vector<const void*> terms;
      for (const PeerReplica& replica : replicas[index]) terms.push_back(table.Slot(replica.rank, kind, replica.slot));
      SumInOrder(numbers[kind], terms, count, table.Home(rank, kind, index));
    }
  }
}

}  // namespace

Status RunPeerTasks(std::vector<PeerTask> tasks, PeerTable table, std::function<void()> done) {
  std::vector<Copier*> copiers;
  if (Status bad = CopiersOf(table, &copiers)) return bad;
  if (tasks.empty()) {
    // Without slots, no task would count down to `done`.
    done();
  } else {
    Run::Start(std::make_shared<Run>(std::move(tasks), std::move(table), std::move(copiers), std::move(done)));
  }
  return Ok();
}

Status RunPeerSums(MatrixView<const int32_t> wanted, const std::vector<PeerNumber>& numbers, PeerTable table,
                   std::function<void()> done) {
  struct Sums {
    PeerTable table;
    std::vector<PeerNumber> numbers;
    std::function<void()> done;
    std::atomic<size_t> num_open;
  };
  std::vector<Copier*> copiers;
  if (Status bad = CopiersOf(table, &copiers)) return bad;
  const size_t num_ranks = table.num_ranks();
  const auto sums = std::shared_ptr<Sums>(new Sums{std::move(table), numbers, std::move(done), {num_ranks}});
  std::vector<Copier::Jobs> jobs(num_ranks);
  for (size_t rank = 0; rank < num_ranks; ++rank) {
    // The home's copier adds up all replicas of its experts. One writer and one order make the sums bitwise
    // reproducible.
    jobs[rank].push_back([sums, wanted, rank] {
      SumAtHome(wanted, sums->numbers, sums->table, rank);
      if (--sums->num_open == 0) sums->done();
    });
  }
  for (size_t rank = 0; rank < num_ranks; ++rank) copiers[rank]->Enqueue(std::move(jobs[rank]));
  return Ok();
}

}  // namespace moe_lb
