// Connections of processes, their shared words and their memory, without copies of a layer: processes_test.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/common/testing.h"
#include "ffi/testing/cuda/memory.h"
#include "ffi/testing/cuda/processes.h"
#include "ffi/testing/cuda/stand_in.h"
#include "ffi/transport/mapped_memory_cuda.h"
#include "ffi/transport/neighbours_cuda.h"
#include "ffi/transport/peer_probe_cuda.h"
#include "ffi/transport/process_group_cuda.h"

// Without the option it waits a second before the end of each process.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_options() { return "atexit_sleep_ms=0"; }

namespace {

using namespace moe_lb::testing;

// CUDA does not allow it, and the stand-in shows it, whatever the handlers do.
void FreeOpenMemory(int64_t rank, int64_t) {
  const Allocation own = NewAllocation(4096, MemoryKind::kClassic);
  std::memcpy(own.begin, &rank, sizeof(int32_t));
  moe_lb::peer_cuda::MappedMemory mapped(&moe_lb::Neighbours::OfProcess());
  moe_lb::peer_cuda::SharedMemory shared(&moe_lb::Neighbours::OfProcess());
  moe_lb::SharedArray array;
  const std::byte* here = nullptr;
  EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
  EXPECT(!shared.Share(own.begin, {0, 1}, 30, &array).problem);
  EXPECT(!mapped.Find(1 - rank, {1, 0}, 4096, 0, 30, &here));
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  FreeAllocation(own);
  EXPECT_EQ(Violations().size(), size_t{1});
  EXPECT(Has(Violations()[0], "memory was freed that another process has open"));
  std::_Exit(0);
}

// An array that another process names must lie in its memory, to the last byte.
void NameTooMuch(int64_t rank, int64_t) {
  const Allocation own = NewAllocation(10000, MemoryKind::kMapped);
  moe_lb::peer_cuda::MappedMemory mapped(&moe_lb::Neighbours::OfProcess());
  moe_lb::peer_cuda::SharedMemory shared(&moe_lb::Neighbours::OfProcess());
  moe_lb::SharedArray array;
  const std::byte* here = nullptr;
  EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
  EXPECT(!shared.Share(own.begin + 100, {0, 1}, 30, &array).problem);
  EXPECT(array.memory == 1 && array.offset == 100);
  EXPECT(!mapped.Find(1 - rank, {1, 9900}, 100, 0, 30, &here));
  for (const auto& [offset, bytes] : std::vector<std::pair<uint64_t, size_t>>{
           {9901, 100}, {10000, 1}, {0, 10001}, {UINT64_MAX, 100}, {UINT64_MAX - 49, 100}}) {
    const moe_lb::Status bad = mapped.Find(1 - rank, {1, offset}, bytes, 0, 30, &here);
    EXPECT(bad && Has(*bad, "has named " + std::to_string(bytes) + " bytes from byte " + std::to_string(offset)));
  }
}

// Freed memory: the descriptor of memory that was never mapped is dropped, and every group that has mapped it unmaps
// it.
void Forget(int64_t rank, int64_t) {
  moe_lb::Neighbours& neighbours = moe_lb::Neighbours::OfProcess();
  moe_lb::peer_cuda::SharedMemory shared[2] = {moe_lb::peer_cuda::SharedMemory(&neighbours),
                                               moe_lb::peer_cuda::SharedMemory(&neighbours)};
  moe_lb::peer_cuda::MappedMemory mapped[2] = {moe_lb::peer_cuda::MappedMemory(&neighbours),
                                               moe_lb::peer_cuda::MappedMemory(&neighbours)};
  moe_lb::PeerNote note;
  moe_lb::Descriptor descriptor;
  // Notes arrive in order, so the other's earlier notes have arrived.
  const auto meet = [&](uint64_t number) {
    moe_lb::PeerNote here;
    here.kind = moe_lb::PeerNote::kProbe;
    here.id = number;
    EXPECT(!neighbours.Send(1 - rank, here, -1, 30).problem);
    while (!neighbours.Take(1 - rank, here.kind, number, &note, &descriptor)) std::this_thread::yield();
  };
  EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
  for (const bool maps : {false, true}) {
    const Allocation own = NewAllocation(4096, MemoryKind::kMapped);
    moe_lb::SharedArray array;
    const std::byte* here = nullptr;
    for (auto& one : shared) EXPECT(!one.Share(own.begin, {0, 1}, 30, &array).problem);
    for (auto& one : mapped) EXPECT(!maps || !one.Find(1 - rank, array, 4096, 0, 30, &here));
    EXPECT_EQ(NumMapped(), maps ? 2 : 0);
    meet(maps ? 2 : 0);
    FreeAllocation(own);
    for (auto& one : shared) one.ForgetFreed();
    meet(maps ? 3 : 1);
    EXPECT(!neighbours.Take(1 - rank, moe_lb::PeerNote::kMemory, array.memory, &note, &descriptor));
    for (auto& one : mapped) one.DropGone();
    EXPECT_EQ(NumMapped(), 0);
  }
}

// Every process copies a word of every other, once, as when processes connect.
moe_lb::Status TryPeers(int64_t rank, int64_t count, int64_t number, int device) {
  EXPECT_EQ(cudaSetDevice(device), cudaSuccess);
  const Allocation memory = NewAllocation(4096, rank % 2 == 0 ? MemoryKind::kClassic : MemoryKind::kMapped);
  EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
  const auto word = static_cast<int32_t>(number);
  std::memcpy(memory.begin + 8, &word, sizeof word);
  moe_lb::Status bad = moe_lb::peer_cuda::TryPeers(ProcessesUpTo(count), memory.begin + 8, device, 30);
  int now = -1;
  EXPECT_EQ(cudaGetDevice(&now), cudaSuccess);
  EXPECT_EQ(now, 0);
  EXPECT(NumMapped() == 0 && NumReserved() == 0);
  // The others may still read.
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  return bad;
}

moe_lb::Status TryPeers(int64_t rank, int64_t count, int64_t number) {
  return TryPeers(rank, count, number, static_cast<int>(rank) + 1);
}

void Probe(int64_t rank, int64_t count) { EXPECT_EQ(TryPeers(rank, count, rank).value_or(""), std::string()); }

// Of an ordered pair alone: device 1 cannot read the device of the owner.
void ProbeWithout(int64_t rank, int64_t count, int64_t owner) {
  TheStandIn().without_peer_access = {{1, static_cast<int>(owner) + 1}};
  const moe_lb::Status bad = TryPeers(rank, count, rank);
  EXPECT_EQ(bad.has_value(), rank == 0);
  if (bad) EXPECT(Has(*bad, "device 1 cannot copy from process " + std::to_string(owner) + ": "));
}

void ProbeWithoutMapped(int64_t rank, int64_t count) { ProbeWithout(rank, count, 1); }

void ProbeWithoutClassic(int64_t rank, int64_t count) { ProbeWithout(rank, count, 2); }

// The same, numbered by the machine: process 0 sees device 5 alone and cannot read device 3, which process 1 sees.
void ProbeVisible(int64_t rank, int64_t count) {
  TheStandIn().visible = {5 - 2 * static_cast<int>(rank)};
  TheStandIn().without_peer_access = {{5, 3}, {0, 0}};
  const moe_lb::Status bad = TryPeers(rank, count, rank, 0);
  EXPECT_EQ(bad.has_value(), rank == 0);
  if (bad) EXPECT(Has(*bad, "device 0 cannot copy from process 1: "));
}

// A device that does not get on ends the probe by the time-out; its copy may still read the memory, which stays mapped.
void ProbeLate(int64_t rank, int64_t count) {
  EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
  const Allocation memory = NewAllocation(4096, MemoryKind::kMapped);
  const auto word = static_cast<int32_t>(rank);
  std::memcpy(memory.begin, &word, sizeof word);
  TheStandIn().fetch_us = rank == 0 ? 3'000'000 : 0;
  const moe_lb::Status bad = moe_lb::peer_cuda::TryPeers(ProcessesUpTo(count), memory.begin, 0, 2);
  EXPECT_EQ(bad.has_value(), rank == 0);
  if (bad) EXPECT(Has(*bad, "cannot copy from process 1: the copy did not end within 2 s; expected the device to"));
  EXPECT_EQ(NumMapped(), rank == 0 ? 1 : 0);
  // Until the copy ends.
  std::this_thread::sleep_for(std::chrono::seconds(rank == 0 ? 2 : 4));
}

// A word that is not there: memory of another kind of mapping, or stale memory.
void ProbeStale(int64_t rank, int64_t count) {
  const moe_lb::Status bad = TryPeers(rank, count, rank + 40);
  EXPECT(bad && Has(*bad, "; expected "));
}

// A process that ends before it has named memory is reported, and its end is reported once.
void EndBeforeTheProbe(int64_t rank, int64_t) {
  static std::atomic<int> num_ends{0};
  moe_lb::Neighbours& neighbours = moe_lb::Neighbours::OfProcess();
  neighbours.OnEnd([](int64_t) { ++num_ends; });
  // There is no connection with the process itself.
  const moe_lb::Status unknown = neighbours.Send(rank + 2, {}, -1, 30).problem;
  EXPECT(unknown && Has(*unknown, "is not connected with this one"));
  if (rank == 1) {
    moe_lb::PeerNote note;
    moe_lb::Descriptor none;
    while (!neighbours.Take(0, moe_lb::PeerNote::kProbe, 0, &note, &none)) std::this_thread::yield();
    return;
  }
  EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
  const Allocation memory = NewAllocation(4096, MemoryKind::kMapped);
  const moe_lb::Status bad = moe_lb::peer_cuda::TryPeers({0, 1}, memory.begin, 0, 5);
  EXPECT(bad && Has(*bad, "cannot copy from process 1: process 1: it has ended"));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(num_ends.load(), 1);
  const moe_lb::Status late = neighbours.Send(1, {}, -1, 30).problem;
  EXPECT(late && Has(*late, "process 1: it has ended"));
}

// The words of a page count the queued and completed tasks of one call: the next call of the entry starts from 0.
void CountTasks(int64_t rank, int64_t count) {
  using moe_lb::ProcessGroup;
  const auto own = static_cast<size_t>(rank), other = 1 - own;
  ProcessGroup* group = nullptr;
  EXPECT(!ProcessGroup::Of(&moe_lb::Neighbours::OfProcess(), ProcessesUpTo(count), "pages", 30, &group).failure);
  EXPECT(!group->WaitForPages("pages", 30).failure);
  const auto announce = [&](uint32_t number) {
    EXPECT(!group->WaitForRing("ring", number, 30).failure);
    group->Announce(number, {});
    EXPECT(!group->WaitForAll("all", number, 30).failure);
  };
  const uint32_t first = group->Next(), last = first + 1, later = first + moe_lb::SharedCalls::kNum;
  announce(first);
  group->ShowQueued(first, 3);
  // As the stream does.
  group->call(own, first).forwarded = 3;
  EXPECT(!group->WaitForQueued("queued", first, other, 2, 30).failure);
  EXPECT(group->WaitForQueued("queued", first, other, 3, 0.05).timed_out);
  group->ShowCopied(first);
  announce(later);
  EXPECT(group->WaitForQueued("queued", later, other, 0, 0.05).timed_out);
  EXPECT_EQ(group->call(other, later).forwarded.load(), 0u);
  // Until the other process has read these words.
  announce(last);
}

const ProcessParts kParts = {
    {"free", FreeOpenMemory},
    {"bounds", NameTooMuch},
    {"forget", Forget},
    {"probe", Probe},
    {"probe_mapped", ProbeWithoutMapped},
    {"probe_classic", ProbeWithoutClassic},
    {"probe_visible", ProbeVisible},
    {"probe_stale", ProbeStale},
    {"probe_end", EndBeforeTheProbe},
    {"probe_late", ProbeLate},
    {"tasks", CountTasks},
};

}  // namespace

// Without arguments, run the test; with a part and a number of processes, that part; a child also has its rank.
// `--parts` prints them, for ci/mutants.py.
int main(int argc, char** argv) {
  if (argc >= 4) return RunProcess(argv, kParts);
  const std::vector<std::pair<std::string, int64_t>> parts = {
      {"probe", 3},         {"probe_mapped", 3}, {"probe_classic", 3}, {"probe_stale", 3},
      {"probe_visible", 2}, {"probe_end", 2},    {"probe_late", 2},    {"free", 2},
      {"bounds", 2},        {"tasks", 2},        {"forget", 2},
  };
  for (const auto& [part, count] : parts) {
    if (argc == 2) std::cout << part << " " << count << std::endl;
    if (argc == 2 || (argc == 3 && (part != argv[1] || count != std::stoll(argv[2])))) continue;
    ExpectAllSucceed(argv[0], part, count);
  }
}
