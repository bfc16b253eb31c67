#include "ffi/planning/device/fibers.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <numeric>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace moe_lb::device {
namespace {

constexpr size_t kStackBytes = 128 << 10;

// Of this thread of the system, because several may run blocks at once.
thread_local Fibers* entered = nullptr;
thread_local void (*entry)(Fibers*) = nullptr;
void EnterFiber() {
  entry(entered);
  std::abort();  // a fiber parks at its end
}

#if defined(__x86_64__)

// A context is its stack pointer; the registers kept by a call are on the stack. `ucontext` would enter the kernel.
extern "C" void moe_lb_switch_fiber(void** from, void* to);
asm(R"(
.text
.type moe_lb_switch_fiber, @function
moe_lb_switch_fiber:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size moe_lb_switch_fiber, .-moe_lb_switch_fiber
)");

void Switch(void** from, void* to) { moe_lb_switch_fiber(from, to); }

void* NewContext(char* stack) {
  auto top = reinterpret_cast<uintptr_t>(stack + kStackBytes) & ~uintptr_t{15};
  auto* words = reinterpret_cast<uint64_t*>(top) - 2;
  *words = reinterpret_cast<uint64_t>(&EnterFiber);  // returned to with the stack as after a call
  words -= 6;
  std::fill_n(words, 6, 0);
  return words;
}

#else

// A parked context is on the stack of its fiber.
void Switch(void** from, void* to) {
  ucontext_t here;
  *from = &here;
  swapcontext(&here, static_cast<ucontext_t*>(to));
}

void* NewContext(char* stack) {
  auto* context = new (stack) ucontext_t;
  getcontext(context);
  context->uc_stack.ss_sp = stack + sizeof(ucontext_t);
  context->uc_stack.ss_size = kStackBytes - sizeof(ucontext_t);
  context->uc_link = nullptr;
  makecontext(context, EnterFiber, 0);
  return context;
}

#endif

void Wait(BlockTime* time, int64_t cycles) {
  time->cycles += cycles;
  time->overlapped += cycles;
}

const BlockTime& Longer(const BlockTime& a, const BlockTime& b) { return a.cycles < b.cycles ? b : a; }

}  // namespace

Fibers::Fibers(size_t shared_bytes) : shared_(shared_bytes), shadows_(shared_bytes), fibers_(kThreads) {
  for (int thread = 0; thread < kThreads; ++thread) {
    threads_.emplace_back(this, thread);
    fibers_[static_cast<size_t>(thread)].stack.reset(new char[kStackBytes]);
  }
}

Fibers::~Fibers() = default;

void Fibers::Run(const std::function<void(const FiberThreads&)>& kernel) {
  kernel_ = &kernel;
  // Shared memory is uninitialized on a GPU. Zeros are valid numbers of ranks and experts.
  std::fill(shared_.begin(), shared_.end(), static_cast<char>(block_number_ % 2 == 0 ? 0xa5 : 0));
  time_ = {};
  ++block_number_;
  ends_ = false;
  for (int thread = 0; thread < kThreads; ++thread) Start(thread);
  for (;;) {
    for (const int warp : Sequence(kWarps)) RunWarp(warp);
    if (ends_) return;
    const auto ends = std::count_if(fibers_.begin(), fibers_.end(), [](auto& f) { return f.state == State::kEnds; });
    if (ends == kThreads) break;
    if (ends > 0) Fault("some threads end before a barrier of the block");
    ReleaseBlock();
    if (ends_) return;
  }
  for (const Fiber& fiber : fibers_) time_ = Longer(time_, fiber.time);
}

void Fibers::Enter(Fibers* block) {
  const int thread = block->current_;
  (*block->kernel_)(block->threads_[static_cast<size_t>(thread)]);
  block->Park(thread, State::kEnds);
}

void Fibers::Start(int thread) {
  Fiber& fiber = fibers_[static_cast<size_t>(thread)];
#if defined(__SANITIZE_ADDRESS__)
  // Frames of an earlier run were left as they were.
  __asan_unpoison_memory_region(fiber.stack.get(), kStackBytes);
#endif
  fiber.context = NewContext(fiber.stack.get());
  fiber.state = State::kRuns;
  fiber.time = {};
}

void Fibers::Resume(int thread) {
  current_ = thread;
  entered = this;
  entry = Enter;
  Switch(&scheduler_, fibers_[static_cast<size_t>(thread)].context);
}

void Fibers::Park(int thread, State state) {
  Fiber& fiber = fibers_[static_cast<size_t>(thread)];
  fiber.state = state;
  Switch(&fiber.context, scheduler_);
}

std::vector<int> Fibers::Sequence(int count) {
  std::vector<int> sequence(static_cast<size_t>(count));
  std::iota(sequence.begin(), sequence.end(), 0);
  if (order == Order::kDescending) std::reverse(sequence.begin(), sequence.end());
  if (order == Order::kRandom) std::shuffle(sequence.begin(), sequence.end(), random);
  return sequence;
}

// Runs a warp until all its lanes are at a barrier of the block or at the end.
void Fibers::RunWarp(int warp) {
  const auto first = fibers_.begin() + warp * kLanes;
  const auto is = [&](State state) {
    return std::all_of(first, first + kLanes, [&](const Fiber& fiber) { return fiber.state == state; });
  };
  while (!ends_ && !is(State::kEnds) && !is(State::kSyncs)) {
    for (const int lane : Sequence(kLanes)) {
      if (!ends_ && (first + lane)->state == State::kRuns) Resume(warp * kLanes + lane);
    }
    if (ends_) return;
    if (is(State::kMeets)) {
      Resolve(warp);
    } else if (!is(State::kEnds) && !is(State::kSyncs)) {
      Fault("lanes of a warp are at different operations, near line " + std::to_string(first->line));
    }
  }
}

void Fibers::Resolve(int warp) {
  const auto first = fibers_.begin() + warp * kLanes;
  const WarpOperation operation = first->operation;
  uint64_t all = first->value;
  uint32_t votes = 0;
  BlockTime time;
  for (int lane = 0; lane < kLanes; ++lane) {
    const Fiber& fiber = *(first + lane);
    if (fiber.line != first->line || fiber.operation != operation) {
      Fault("lanes meet at lines " + std::to_string(first->line) + " and " + std::to_string(fiber.line));
    }
    time = Longer(time, fiber.time);
    votes |= fiber.value != 0 ? 1u << lane : 0;
    if (lane == 0) continue;
    if (operation == WarpOperation::kMax) all = std::max(all, fiber.value);
    if (operation == WarpOperation::kMin) all = std::min(all, fiber.value);
    if (operation == WarpOperation::kOr) all |= fiber.value;
    if (operation == WarpOperation::kSum) all = static_cast<uint32_t>(all + fiber.value);
  }
  if (operation == WarpOperation::kBallot) all = votes;
  Wait(&time, operation == WarpOperation::kBallot    ? Latency::kBallot
              : operation == WarpOperation::kShuffle ? Latency::kShuffle
              : operation == WarpOperation::kBarrier ? Latency::kSyncWarp
                                                     : Latency::kReduce);
  ++time.warp_operations;
  if (operation == WarpOperation::kBarrier) ++warp_number_[warp];
  for (auto fiber = first; fiber != first + kLanes; ++fiber) {
    fiber->result = operation == WarpOperation::kShuffle ? (first + fiber->from % kLanes)->value : all;
    fiber->time = time;
    fiber->loads = false;
    fiber->state = State::kRuns;
  }
}

void Fibers::ReleaseBlock() {
  ++block_number_;
  BlockTime time;
  for (const Fiber& fiber : fibers_) {
    time = Longer(time, fiber.time);
    if (fiber.line != fibers_[0].line) Fault("threads are at different barriers of the block");
  }
  Wait(&time, Latency::kSyncBlock);
  ++time.block_barriers;
  for (Fiber& fiber : fibers_) {
    fiber.time = time;
    fiber.loads = false;
    fiber.state = State::kRuns;
  }
}

uint64_t Fibers::Join(int thread, WarpOperation operation, uint64_t value, int from, int line) {
  Fiber& fiber = fibers_[static_cast<size_t>(thread)];
  fiber.operation = operation;
  fiber.value = value;
  fiber.from = from;
  fiber.line = line;
  Park(thread, State::kMeets);
  return fiber.result;
}

void Fibers::Fault(const std::string& what) {
  faults_.push_back(what);
  ends_ = true;
}

// Ends the run from inside of a fiber, whose stack is left as it is.
void Fibers::Leave(int thread, const char* what, int other) {
  Fault("thread " + std::to_string(thread) + " " + what + " thread " + std::to_string(other));
  Park(thread, State::kEnds);
}

void FiberThreads::SyncWarp(const char* file, int line) const {
  const Barrier barrier = {file, line};
  if (barrier == block_->disabled) return;
  block_->barriers_.insert(barrier);
  block_->Join(thread_, Fibers::WarpOperation::kBarrier, 0, 0, line);
}

void FiberThreads::SyncBlock(const char* file, int line) const {
  const Barrier barrier = {file, line};
  if (barrier == block_->disabled) return;
  block_->barriers_.insert(barrier);
  block_->fibers_[static_cast<size_t>(thread_)].line = line;
  block_->Park(thread_, Fibers::State::kSyncs);
}

uint32_t FiberThreads::Max(uint32_t value, int line) const {
  return static_cast<uint32_t>(block_->Join(thread_, Fibers::WarpOperation::kMax, value, 0, line));
}

uint32_t FiberThreads::Min(uint32_t value, int line) const {
  return static_cast<uint32_t>(block_->Join(thread_, Fibers::WarpOperation::kMin, value, 0, line));
}

uint32_t FiberThreads::Or(uint32_t value, int line) const {
  return static_cast<uint32_t>(block_->Join(thread_, Fibers::WarpOperation::kOr, value, 0, line));
}

uint32_t FiberThreads::Sum(uint32_t value, int line) const {
  return static_cast<uint32_t>(block_->Join(thread_, Fibers::WarpOperation::kSum, value, 0, line));
}

uint32_t FiberThreads::Ballot(bool condition, int line) const {
  return static_cast<uint32_t>(block_->Join(thread_, Fibers::WarpOperation::kBallot, condition ? 1 : 0, 0, line));
}

uint64_t FiberThreads::Shuffle(uint64_t value, int lane, int line) const {
  return block_->Join(thread_, Fibers::WarpOperation::kShuffle, value, lane, line);
}

// Two accesses are ordered by a barrier of the block between them, or, within a warp, by one of the warp.
void FiberThreads::OnRead(Shadow* shadow) const {
  Fibers& block = *block_;
  Fibers::Fiber& fiber = block.fibers_[static_cast<size_t>(thread_)];
  const bool is_first = shadow != nullptr && !fiber.loads;
  Wait(&fiber.time, shadow == nullptr ? Latency::kGlobal : is_first ? Latency::kShared : Latency::kIssue);
  fiber.time.cycles += shadow != nullptr && !is_first ? Latency::kShared - Latency::kIssue : 0;
  fiber.time.shared_loads += shadow == nullptr ? 0 : 1;
  fiber.loads = fiber.loads || is_first;
  if (shadow == nullptr) return;
  const uint64_t now = block.block_number_;
  const uint64_t here = block.warp_number_[warp()];
  const bool other_warp = shadow->writer / kLanes != warp();
  if (shadow->writer != thread_ && shadow->write_block == now && (other_warp || shadow->write_warp == here)) {
    block.Leave(thread_, "reads, without a barrier, a place written by", shadow->writer);
  }
  if (shadow->read_block != now) {
    *shadow = {shadow->write_block, shadow->write_warp, now, here, shadow->writer, thread_, false, false,
               shadow->is_atomic};
  } else if (shadow->reader / kLanes != warp()) {
    shadow->several_warps = true;
  } else if (shadow->read_warp != here) {
    shadow->read_warp = here;
    shadow->reader = thread_;
    shadow->several_lanes = false;
  } else if (shadow->reader != thread_) {
    shadow->several_lanes = true;
  }
}

void FiberThreads::OnWrite(Shadow* shadow, bool is_atomic) const {
  Fibers& block = *block_;
  Wait(&block.fibers_[static_cast<size_t>(thread_)].time, is_atomic ? Latency::kAtomic : Latency::kIssue);
  if (shadow == nullptr) return;
  const uint64_t now = block.block_number_;
  const uint64_t here = block.warp_number_[warp()];
  const bool other_warp = shadow->writer / kLanes != warp();
  const bool is_same_phase = shadow->write_block == now && (other_warp || shadow->write_warp == here);
  const bool races = shadow->writer != thread_ && is_same_phase;
  if (races && !(is_atomic && shadow->is_atomic)) {
    block.Leave(thread_, "writes, without a barrier, a place written by", shadow->writer);
  }
  if (shadow->read_block == now) {
    const bool same_warp = shadow->reader / kLanes == warp();
    const bool same_lane = shadow->reader == thread_ && !shadow->several_lanes;
    if (shadow->several_warps || !same_warp || (shadow->read_warp == here && !same_lane)) {
      block.Leave(thread_, "writes, without a barrier, a place read by", shadow->reader);
    }
  }
  // After a plain write of this thread, an atomic one is no more ordered for others.
  shadow->is_atomic = is_atomic && (shadow->is_atomic || !is_same_phase);
  shadow->write_block = now;
  shadow->write_warp = here;
  shadow->writer = races ? Shadow::kSeveral : thread_;
}

void FiberThreads::CheckIndex(int i, size_t size) const {
  if (i >= 0 && static_cast<size_t>(i) < size) return;
  block_->Fault("thread " + std::to_string(thread_) + " uses element " + std::to_string(i) + " of " +
                std::to_string(size));
  block_->Park(thread_, Fibers::State::kEnds);
}

Shadow* FiberThreads::ShadowAt(const void* place) const {
  const auto offset = static_cast<const char*>(place) - block_->shared_.data();
  if (offset < 0 || offset >= static_cast<std::ptrdiff_t>(block_->shared_.size())) {
    block_->Leave(thread_, "is outside of shared memory, as", thread_);
  }
  return &block_->shadows_[static_cast<size_t>(offset)];
}

}  // namespace moe_lb::device
