// A block of a GPU on the CPU: one fiber per thread, switched at barriers and at operations of a warp.
//
// It runs the threads in a chosen order, and stops at a fault: two accesses to one place of shared memory, of which one
// writes, that no barrier orders, or an operation of a warp not reached by all its lanes. It adds up the latencies on
// the longest path. A barrier can be disabled, to show that a test needs it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "ffi/planning/device/threads.h"

namespace moe_lb::device {

enum class Order { kAscending, kDescending, kRandom };

// A barrier in the source.
struct Barrier {
  const char* file;
  int line;
  bool operator<(const Barrier& other) const { return line != other.line ? line < other.line : file < other.file; }
  bool operator==(const Barrier& other) const { return line == other.line && file == other.file; }
};

// Cycles of an H100 until a dependent operation can start; estimates of the latency, not measured here.
struct Latency {
  static constexpr int64_t kShared = 30;  // load
  static constexpr int64_t kIssue = 4;    // of a store, or of a load that overlaps with another
  static constexpr int64_t kGlobal = 20;  // per load; loads of a loop overlap
  static constexpr int64_t kAtomic = 40;  // on shared memory
  static constexpr int64_t kReduce = 30;  // over a warp
  static constexpr int64_t kBallot = 15;
  static constexpr int64_t kShuffle = 25;
  static constexpr int64_t kSyncWarp = 15;
  static constexpr int64_t kSyncBlock = 40;
};

// Operations on the path of a thread, or on the longest path of a block, and the sum of their latencies.
struct BlockTime {
  int64_t cycles = 0;      // if no load from shared memory overlaps with another
  int64_t overlapped = 0;  // if all loads between two operations of the warp or block do
  int64_t block_barriers = 0;
  int64_t warp_operations = 0;  // barriers, reductions, ballots and shuffles of a warp
  int64_t shared_loads = 0;
};

class Fibers;

// Last accesses to one place. The numbers of barriers only grow, so that nothing is cleared between runs.
struct Shadow {
  uint64_t write_block = 0, write_warp = 0;  // barriers passed before the last write
  uint64_t read_block = 0, read_warp = 0;
  int32_t writer = -1, reader = -1;
  bool several_lanes = false, several_warps = false;  // read since the last barrier
  bool is_atomic = false;                             // the last write
  // `writer` after atomic writes of several threads, which only a barrier of the block orders before others.
  static constexpr int32_t kSeveral = -kLanes;
};

// A fiber and its block, used by the planners as `t`.
class FiberThreads {
 public:
  template <typename V>
  class Array;

  FiberThreads(Fibers* block, int thread) : block_(block), thread_(thread) {}

  int thread() const { return thread_; }
  int lane() const { return thread_ % kLanes; }
  int warp() const { return thread_ / kLanes; }

  void SyncWarp(const char* file = __builtin_FILE(), int line = __builtin_LINE()) const;
  void SyncBlock(const char* file = __builtin_FILE(), int line = __builtin_LINE()) const;
  uint32_t Max(uint32_t value, int line = __builtin_LINE()) const;
  uint32_t Min(uint32_t value, int line = __builtin_LINE()) const;
  uint32_t Or(uint32_t value, int line = __builtin_LINE()) const;
  uint32_t Sum(uint32_t value, int line = __builtin_LINE()) const;
  uint32_t Ballot(bool condition, int line = __builtin_LINE()) const;
  template <typename V>
  V From(V value, int lane, int line = __builtin_LINE()) const {
    static_assert(sizeof(V) <= sizeof(uint64_t));
    uint64_t word = 0;
    __builtin_memcpy(&word, &value, sizeof(V));
    word = Shuffle(word, lane, line);
    __builtin_memcpy(&value, &word, sizeof(V));
    return value;
  }

  template <typename V>
  V OrAt(const Array<V>& array, int i, V bits) const {
    return array[i].Or(bits);
  }
  template <typename V>
  void AddAt(const Array<V>& array, int i, V value) const {
    array[i].Add(value);
  }

  template <typename V>
  Array<V> Shared(size_t offset, size_t size) const;
  template <typename V>
  Array<V> Global(V* data, size_t size) const {
    return Array<V>(this, data, size, false);
  }

 private:
  friend class Fibers;
  template <typename V>
  friend class FiberRef;

  uint64_t Shuffle(uint64_t value, int lane, int line) const;
  Shadow* ShadowAt(const void* place) const;
  void CheckIndex(int i, size_t size) const;
  void OnRead(Shadow* shadow) const;
  void OnWrite(Shadow* shadow, bool is_atomic = false) const;

  Fibers* block_;
  int thread_;
};

// One element; reads and writes are checked. Elements in global memory are not.
template <typename V>
class FiberRef {
 public:
  FiberRef(const FiberThreads* t, V* place, Shadow* shadow) : t_(t), place_(place), shadow_(shadow) {}
  FiberRef(const FiberRef&) = default;

  operator V() const {
    t_->OnRead(shadow_);
    return *place_;
  }
  void operator=(std::remove_const_t<V> value) const {
    t_->OnWrite(shadow_);
    *place_ = value;
  }
  void operator=(const FiberRef& other) const { *this = static_cast<V>(other); }
  template <typename Other>
  void operator=(const FiberRef<Other>& other) const {
    *this = static_cast<std::remove_const_t<V>>(static_cast<Other>(other));
  }
  void operator+=(V value) const { *this = static_cast<V>(static_cast<V>(*this) + value); }
  void operator-=(V value) const { *this = static_cast<V>(static_cast<V>(*this) - value); }
  void operator|=(V value) const { *this = static_cast<V>(static_cast<V>(*this) | value); }
  void operator&=(V value) const { *this = static_cast<V>(static_cast<V>(*this) & value); }

  // Atomic; Or returns the bits before.
  V Or(V bits) const {
    t_->OnWrite(shadow_, true);
    const V before = *place_;
    *place_ = before | bits;
    return before;
  }
  void Add(V value) const {
    t_->OnWrite(shadow_, true);
    // Sums of arguments that are refused later wrap around, as those of atomicAdd do.
    using Unsigned = std::make_unsigned_t<V>;
    *place_ = static_cast<V>(static_cast<Unsigned>(*place_) + static_cast<Unsigned>(value));
  }

 private:
  const FiberThreads* t_;
  V* place_;
  Shadow* shadow_;
};

template <typename V>
class FiberThreads::Array {
 public:
  Array() = default;
  Array(const FiberThreads* t, V* data, size_t size, bool is_shared)
      : t_(t), data_(data), size_(size), is_shared_(is_shared) {}

  // Elements of every size have a shadow per byte, of which the first is used.
  FiberRef<V> operator[](int i) const {
    t_->CheckIndex(i, size_);
    return FiberRef<V>(t_, data_ + i, is_shared_ ? t_->ShadowAt(data_ + i) : nullptr);
  }

 private:
  const FiberThreads* t_ = nullptr;
  V* data_ = nullptr;
  size_t size_ = 0;
  bool is_shared_ = false;
};

// Runs blocks one after the other.
class Fibers {
 public:
  explicit Fibers(size_t shared_bytes);
  ~Fibers();

  // Runs `kernel` on every thread of a block.
  void Run(const std::function<void(const FiberThreads&)>& kernel);

  Order order = Order::kAscending;
  std::mt19937 random{1};  // of Order::kRandom
  Barrier disabled = {"", 0};

  const std::vector<std::string>& faults() const { return faults_; }
  void ForgetFaults() { faults_.clear(); }
  // All barriers passed so far.
  const std::set<Barrier>& barriers() const { return barriers_; }
  // The longest path of the last run.
  const BlockTime& time() const { return time_; }

 private:
  friend class FiberThreads;
  enum class State { kRuns, kMeets, kSyncs, kEnds };  // of a fiber: meets its warp or the block
  enum class WarpOperation { kMax, kMin, kOr, kSum, kBallot, kShuffle, kBarrier };

  struct Fiber {
    void* context = nullptr;
    std::unique_ptr<char[]> stack;
    State state = State::kEnds;
    WarpOperation operation = WarpOperation::kBarrier;
    int line = 0;
    uint64_t value = 0, result = 0;
    int from = 0;
    BlockTime time;
    bool loads = false;  // since the last operation of the warp or block
  };

  static void Enter(Fibers* block);
  void Start(int thread);
  void Resume(int thread);
  uint64_t Join(int thread, WarpOperation operation, uint64_t value, int from, int line);
  void Park(int thread, State state);
  void RunWarp(int warp);
  void Resolve(int warp);
  void ReleaseBlock();
  std::vector<int> Sequence(int count);
  void Fault(const std::string& what);
  void Leave(int thread, const char* what, int other);

  std::vector<char> shared_;
  std::vector<Shadow> shadows_;
  std::vector<Fiber> fibers_;
  std::vector<FiberThreads> threads_;
  const std::function<void(const FiberThreads&)>* kernel_ = nullptr;
  void* scheduler_ = nullptr;
  int current_ = 0;
  uint64_t block_number_ = 1;          // barriers of the block so far
  uint64_t warp_number_[kWarps] = {};  // barriers of the warp so far, those of the block included
  bool ends_ = false;                  // the run, after a fault
  std::vector<std::string> faults_;
  std::set<Barrier> barriers_;
  BlockTime time_;
};

template <typename V>
FiberThreads::Array<V> FiberThreads::Shared(size_t offset, size_t size) const {
  return Array<V>(this, reinterpret_cast<V*>(block_->shared_.data() + offset), size, true);
}

}  // namespace moe_lb::device
