#include "ffi/transport/peer_runner.h"

#include <atomic>
#include <cstring>
#include <memory>
#include <utility>

#include "ffi/transport/copier.h"

namespace moe_lb {
namespace {

// Alive until the last task is done.
class Run : public std::enable_shared_from_this<Run> {
 public:
  Run(std::vector<PeerTask> tasks, PeerTable table, std::function<void()> done)
      : tasks_(std::move(tasks)),
        table_(std::move(table)),
        done_(std::move(done)),
        unlocks_(tasks_.size()),
        num_waiting_(tasks_.size()),
        num_open_(tasks_.size()) {
    for (size_t i = 0; i < tasks_.size(); ++i) {
      num_waiting_[i] = tasks_[i].after.size();
      for (const size_t before : tasks_[i].after) unlocks_[before].push_back(i);
    }
  }

  void Start() {
    for (size_t i = 0; i < tasks_.size(); ++i) {
      // `num_waiting_` would not do: copiers already count it down, and a task that they bring to 0 would start twice.
      if (tasks_[i].after.empty()) Enqueue(i);
    }
  }

 private:
  void Enqueue(size_t task) {
    // The receiver's copier does the copy, so that all slots of a rank are written by one thread. The run stays alive
    // in the jobs that are still enqueued.
    Copiers::Of(table_.device(tasks_[task].to_rank)).Enqueue([self = shared_from_this(), task] { self->Do(task); });
  }

  void Do(size_t task) {
    for (const PeerPiece& piece : tasks_[task].pieces) {
      std::byte* to = table_.To(tasks_[task], piece);
      if (piece.source == PeerSource::kNothing) {
        std::memset(to, 0, piece.size);
      } else {
        std::memcpy(to, table_.From(piece), piece.size);
      }
    }
    for (const size_t next : unlocks_[task]) {
      // The decrement orders memory: the thread that brings it to 0 has seen what all tasks before have copied, each on
      // a copier of its own, and may forward it.
      if (--num_waiting_[next] == 0) Enqueue(next);
    }
    if (--num_open_ == 0) done_();
  }

  const std::vector<PeerTask> tasks_;
  const PeerTable table_;
  const std::function<void()> done_;
  std::vector<std::vector<size_t>> unlocks_;      // the tasks that wait for each task
  std::vector<std::atomic<size_t>> num_waiting_;  // tasks that each task waits for
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

void RunPeerTasks(std::vector<PeerTask> tasks, PeerTable table, std::function<void()> done) {
  // Where no rank has a slot no task would ever count down to `done`.
  if (tasks.empty()) return done();
  std::make_shared<Run>(std::move(tasks), std::move(table), std::move(done))->Start();
}

void RunPeerSums(MatrixView<const int32_t> wanted, const std::vector<PeerNumber>& numbers, PeerTable table,
                 std::function<void()> done) {
  struct Sums {
    PeerTable table;
    std::vector<PeerNumber> numbers;
    std::function<void()> done;
    std::atomic<size_t> num_open;
  };
  const size_t num_ranks = table.num_ranks();
  const auto sums = std::shared_ptr<Sums>(new Sums{std::move(table), numbers, std::move(done), {num_ranks}});
  for (size_t rank = 0; rank < num_ranks; ++rank) {
    // Home's copier adds up all replicas of its experts. Its sums have one writer and one order, so that their bits do
    // not depend on which rank was first.
    Copiers::Of(sums->table.device(rank)).Enqueue([sums, wanted, rank] {
      SumAtHome(wanted, sums->numbers, sums->table, rank);
      if (--sums->num_open == 0) sums->done();
    });
  }
}

}  // namespace moe_lb
