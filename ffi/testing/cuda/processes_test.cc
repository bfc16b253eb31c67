// Peer copies between processes, one stand-in GPU each, whose memory the others map: values, messages, reallocated
// memory, and processes failing, ending or never arriving. Their connections and memory alone: shared_memory_test.
#include "ffi/testing/cuda/processes.h"

#include <dirent.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/common/testing.h"
#include "ffi/testing/cuda/copy_layer.h"
#include "ffi/testing/cuda/layer_weights.h"
#include "ffi/testing/cuda/planned_layer.h"
#include "ffi/testing/cuda/rows_layer.h"
#include "ffi/testing/cuda/stand_in.h"
#include "ffi/transport/neighbours_cuda.h"

// Without the option it waits a second before the end of each process.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_options() { return "atexit_sleep_ms=0"; }

namespace {

using namespace moe_lb::testing;
using Clock = std::chrono::steady_clock;

constexpr double kPatienceS = 15;

LayerShape ShapeOf(int64_t count) {
  LayerShape shape;
  shape.ranks = count;
  shape.processes = ProcessesUpTo(count);
  return shape;
}

int64_t NumSent() { return moe_lb::Neighbours::OfProcess().num_sent(); }

// ---- parts of each process ---------------------------------------------------------

// All kinds of calls. In later runs the arrays are elsewhere in the same memory, and no notes are sent. device: CUDA's.
void CopyAll(int64_t rank, int64_t count, MemoryKind kind, int device) {
  CopyLayer copies(ShapeOf(count), false), relays(ShapeOf(count), true);
  PlannedLayer planned(ShapeOf(count));
  RowsLayer onward(ShapeOf(count), false), back(ShapeOf(count), true);
  // XLA numbers the only device of a process 0; CUDA numbers the GPUs that it sees.
  Gpu gpu(0, device, kind);
  TheStandIn().longest_delay_us = 100;
  const auto run_all = [&](int64_t run) {
    Program elsewhere(gpu, 1);
    for (int64_t i = 0; i < run % 3; ++i) elsewhere.New(XLA_FFI_DataType_BF16, {3, 96});
    ExpectOk(copies.Run(gpu, rank, run));
    ExpectOk(relays.Run(gpu, rank, run));
    ExpectOk(planned.Run(gpu, rank, run));
    ExpectOk(onward.Run(gpu, rank, run));
    ExpectOk(back.Run(gpu, rank, run));
  };
  run_all(1);
  const int64_t sent = NumSent();
  // Twice as many calls as the page has entries, some of them queued ahead.
  for (int64_t run = 2; run <= 12; ++run) {
    run_all(run);
    if (run % 4 == 0) Synchronize(gpu.stream());
  }
  Synchronize(gpu.stream());
  EXPECT_EQ(NumSent(), sent);
  EXPECT_EQ(copies.num_wrong() + relays.num_wrong() + planned.num_wrong(), 0);
  EXPECT_EQ(onward.num_wrong() + back.num_wrong(), 0);
  EXPECT(count == 1 || planned.num_replicas() > 0);
  EXPECT(NumMapped() >= 1 && NumMapped() <= count - 1);
  // No thread has made a context on another device.
  EXPECT(Contexts() == std::set<int>{device});
}

void CopyClassic(int64_t rank, int64_t count) {
  CopyAll(rank, count, MemoryKind::kClassic, static_cast<int>(7 - rank));
}
void CopyMapped(int64_t rank, int64_t count) { CopyAll(rank, count, MemoryKind::kMapped, static_cast<int>(7 - rank)); }

// Each process sees two devices, in another order: its device 0 is another one on the machine, and its device 1 the
// device 0 of the next process.
void CopyVisible(int64_t rank, int64_t count) {
  const auto machine = [count](int64_t of) { return static_cast<int>((of % count + 1) % count); };
  TheStandIn().visible = {machine(rank), machine(rank + 1)};
  CopyAll(rank, count, MemoryKind::kMapped, 0);
}

// Two groups of one program: each copies other weights by other tables, and maps no memory of the other group.
void CopyInGroups(int64_t rank, int64_t count) {
  LayerShape shape = ShapeOf(count);
  shape.ranks = count / 2;
  CopyLayer copies(shape, true);
  Gpu gpu(0, 0, MemoryKind::kMapped);
  for (int64_t run = 1; run <= 4; ++run) {
    ExpectOk(copies.Run(gpu, rank % shape.ranks, run + 10 * (rank / shape.ranks)));
    Synchronize(gpu.stream());
    EXPECT_EQ(copies.num_wrong(), 0);
    EXPECT(NumMapped() <= shape.ranks - 1);
  }
}

// More copies in flight than the pages have entries, the first in many more chunks than the last, and one rank with a
// slow stream.
void BeginMany(int64_t rank, int64_t count) {
  LayerShape wide = ShapeOf(count), narrow = ShapeOf(count);
  wide.widths = {400, 400};
  narrow.widths = {8};
  CopyLayer many_chunks(wide, true), few_chunks(narrow, true);
  Gpu gpu(0, 0, MemoryKind::kClassic);
  std::vector<CopyLayer*> layers(4, &many_chunks);
  layers.resize(24, &few_chunks);
  TheStandIn().copy_us = rank == count - 1 ? 2000 : 0;
  ExpectOk(CopyLayer::RunAll(layers, gpu, rank, 1));
  Synchronize(gpu.stream());
  EXPECT_EQ(many_chunks.num_wrong() + few_chunks.num_wrong(), 0);
}

// New memory at the same addresses: a stale mapping would read the old contents.
void Reallocate(int64_t rank, int64_t count) {
  CopyLayer copies(ShapeOf(count), true);
  Gpu gpu(0, 0, MemoryKind::kMapped);
  for (int64_t run = 1; run <= 6; ++run) {
    ExpectOk(copies.Run(gpu, rank, run));
    Synchronize(gpu.stream());
    EXPECT_EQ(copies.num_wrong(), 0);
    // Freed memory is unmapped before other memory of the same process is mapped.
    EXPECT(NumMapped() <= count - 1);
    if (run % 2 == rank % 2) gpu.ReallocateShared();
  }
}

// Memory is freed that nobody shares again: the others unmap it at their next calls, and so free it.
void Move(int64_t rank, int64_t count) {
  CopyLayer copies(ShapeOf(count), true);
  Gpu gpu(0, 0, MemoryKind::kMapped);
  for (int64_t run = 1; run <= 8; ++run) {
    ExpectOk(copies.Run(gpu, rank, run));
    Synchronize(gpu.stream());
    EXPECT_EQ(copies.num_wrong(), 0);
    if (run <= 3) gpu.MoveShared();
    // A notice may come late.
    if (run == 5) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    EXPECT(run < 7 || NumMapped() <= count - 1);
  }
}

// One rank is killed between start and join. The others end with its name, and no stream waits.
template <typename Layer>
void OneDies(Layer& layer, int64_t rank, int64_t count) {
  Gpu gpu(0, 0, MemoryKind::kMapped);
  const int64_t victim = 1;
  TheStandIn().copy_us = 3000;
  Ending ending;
  const Clock::time_point begin = Clock::now();
  for (int64_t run = 1; ending.ok; ++run) {
    moe_lb::testing::Between between;
    between.dies = rank == victim && run == 4;
    // The others are at the join by then, or wait for copies of the rank.
    if (between.dies) TheStandIn().copy_us = 300000;
    ending = layer.Run(gpu, rank, run, between);
    EXPECT(run < 8);
  }
  Synchronize(gpu.stream());
  EXPECT_EQ(ending.code, XLA_FFI_Error_Code_INTERNAL);
  // A rank that ends because of the victim may be seen first by others.
  EXPECT(Has(ending.message, " of " + std::to_string(count) + " has ended (process "));
  EXPECT(rank != 0 || Has(ending.message, "rank " + std::to_string(victim) + " of "));
  EXPECT(std::chrono::duration<double>(Clock::now() - begin).count() < kPatienceS);
  // Until all others have ended, too.
  std::this_thread::sleep_for(std::chrono::seconds(1));
}

void DieInCopies(int64_t rank, int64_t count) {
  CopyLayer layer(ShapeOf(count), false);
  OneDies(layer, rank, count);
}
void DieInRelays(int64_t rank, int64_t count) {
  CopyLayer layer(ShapeOf(count), true);
  OneDies(layer, rank, count);
}
void DieInPlan(int64_t rank, int64_t count) {
  PlannedLayer layer(ShapeOf(count));
  OneDies(layer, rank, count);
}
void DieInRows(int64_t rank, int64_t count) {
  RowsLayer layer(ShapeOf(count), false);
  OneDies(layer, rank, count);
}

// A kernel of one rank fails. Its own error ends it, and so the others, which wait for none of its words.
void FailKernel(int64_t rank, int64_t count) {
  CopyLayer layer(ShapeOf(count), true);
  Gpu gpu(0, 0, MemoryKind::kMapped);
  TheStandIn().copy_us = 1000;
  Ending ending;
  const Clock::time_point begin = Clock::now();
  for (int64_t run = 1; ending.ok; ++run) {
    moe_lb::testing::Between between;
    between.corrupts = rank == 1 && run == 4;
    ending = layer.Run(gpu, rank, run, between);
    EXPECT(run < 12);
  }
  EXPECT_EQ(ending.code, XLA_FFI_Error_Code_INTERNAL);
  EXPECT(Has(ending.message, "cudaErrorIllegalAddress") || (rank != 1 && Has(ending.message, " has ended (process ")));
  EXPECT(std::chrono::duration<double>(Clock::now() - begin).count() < kPatienceS);
  if (rank == 1) std::_Exit(0);
  Synchronize(gpu.stream());
  std::this_thread::sleep_for(std::chrono::seconds(1));
}

// Runs until a failure and prints it. On command, a process stops itself in the middle.
void RunUntilFailure(int64_t rank, int64_t count) {
  CopyLayer copies(ShapeOf(count), true);
  PlannedLayer planned(ShapeOf(count));
  Gpu gpu(0, 0, MemoryKind::kMapped);
  TheStandIn().copy_us = 500;
  for (int64_t run = 1;; ++run) {
    Ending ending = copies.Run(gpu, rank, run);
    if (ending.ok) ending = planned.Run(gpu, rank, run);
    if (run == 5) std::cout << "running" << std::endl;
    if (ending.ok) continue;
    // The device does not wait for the missing rank.
    Synchronize(gpu.stream());
    std::cout << ending.code << " " << ending.message << std::endl;
    return;
  }
}

// The last rank makes no call.
void NeverCome(int64_t rank, int64_t count) {
  LayerShape shape = ShapeOf(count);
  shape.timeout_s = 1;
  CopyLayer copies(shape, true);
  Gpu gpu(0, 0, MemoryKind::kClassic);
  ExpectOk(copies.Run(gpu, rank, 1));
  if (rank != count - 1) {
    const Ending ending = copies.Run(gpu, rank, 2);
    EXPECT_EQ(ending.code, XLA_FFI_Error_Code_DEADLINE_EXCEEDED);
    EXPECT(Has(ending.message,
               "rank " + std::to_string(count - 1) + " of " + std::to_string(count) + " did not arrive within 1 s"));
  } else {
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    // A late rank gets the failure too.
    const Ending ending = copies.Run(gpu, rank, 2);
    EXPECT_EQ(ending.code, XLA_FFI_Error_Code_DEADLINE_EXCEEDED);
  }
  Synchronize(gpu.stream());
  ExpectOk(copies.Run(gpu, rank, 3));
  Synchronize(gpu.stream());
  EXPECT_EQ(copies.num_wrong(), 0);
}

// A runtime call fails in one process: all get the failure and can continue.
void OneFails(int64_t rank, int64_t count) {
  CopyLayer copies(ShapeOf(count), true);
  Gpu gpu(0, 0, MemoryKind::kClassic);
  int64_t run = 1;
  ExpectOk(copies.Run(gpu, rank, run++));
  const std::map<const char*, const char*> calls = {{"cudaMemcpyAsync", "CopyWords("},
                                                    {"cuMemGetAddressRange", "cuMemGetAddressRange"}};
  for (const auto& [function, said] : calls) {
    if (rank == 1) FailCalls(function, 1, cudaErrorIllegalAddress);
    const Ending ending = copies.Run(gpu, rank, run++);
    FailCalls("", 0, cudaSuccess);
    EXPECT_EQ(ending.code, XLA_FFI_Error_Code_INTERNAL);
    EXPECT(Has(ending.message, said) && Has(ending.message, "cudaErrorIllegalAddress"));
    Synchronize(gpu.stream());
    ExpectOk(copies.Run(gpu, rank, run++));
  }
  // The stream will not set the word that others wait for.
  if (rank == 1) FailCalls("cuStreamWriteValue32", 0, cudaErrorIllegalAddress, 100);
  const Ending unwritten = copies.Run(gpu, rank, run++);
  FailCalls("", 0, cudaSuccess);
  EXPECT(rank != 1 || unwritten.code == XLA_FFI_Error_Code_INTERNAL);
  Synchronize(gpu.stream());
  ExpectOk(copies.Run(gpu, rank, run++));
  // Part of the copies is queued by then. Ranks copying from this one get the failure; others may be complete.
  if (rank == 1) FailCalls("cuMemcpyBatchAsync", 0, cudaErrorIllegalAddress);
  const Ending ending = copies.Run(gpu, rank, run++);
  FailCalls("", 0, cudaSuccess);
  EXPECT(rank == 0 || ending.code == XLA_FFI_Error_Code_INTERNAL);
  Synchronize(gpu.stream());
  ExpectOk(copies.Run(gpu, rank, run++));
  Synchronize(gpu.stream());
  EXPECT_EQ(copies.num_wrong(), 0);
}

// The pages of a group cannot be locked, once.
void FailToLock(int64_t rank, int64_t count) {
  CopyLayer copies(ShapeOf(count), true);
  Gpu gpu(0, 0, MemoryKind::kMapped);
  FailCalls("cudaHostRegister", 1, cudaErrorMemoryAllocation);
  const Ending ending = copies.Run(gpu, rank, 1);
  FailCalls("", 0, cudaSuccess);
  EXPECT_EQ(ending.code, XLA_FFI_Error_Code_INTERNAL);
  EXPECT(Has(ending.message, "cudaHostRegister") && Has(ending.message, "cudaErrorMemoryAllocation"));
  ExpectOk(copies.Run(gpu, rank, 2));
  Synchronize(gpu.stream());
  EXPECT_EQ(copies.num_wrong(), 0);
}

// The page of a process has room for 16 kinds of weights. Only processes of the program may copy.
void CopyKinds(int64_t rank, int64_t count) {
  Gpu gpu(0, 0, MemoryKind::kMapped);
  LayerShape most = ShapeOf(count), more = ShapeOf(count), others = ShapeOf(count);
  most.widths.assign(16, 8);
  more.widths.assign(17, 8);
  for (int64_t& process : others.processes) process += 100;
  CopyLayer copies(most, true), too_many(more, true), strange(others, true);
  ExpectOk(copies.Run(gpu, rank, 1));
  const Ending refused = too_many.Run(gpu, rank, 2);
  EXPECT_EQ(refused.code, XLA_FFI_Error_Code_INVALID_ARGUMENT);
  EXPECT(Has(refused.message, "home has 17 kinds of weights; expected at most 16"));
  const Ending unnamed = strange.Run(gpu, rank, 3);
  EXPECT_EQ(unnamed.code, XLA_FFI_Error_Code_INVALID_ARGUMENT);
  EXPECT(Has(unnamed.message, "; expected all that run the program"));
  Synchronize(gpu.stream());
  ExpectOk(copies.Run(gpu, rank, 4));
  Synchronize(gpu.stream());
  EXPECT_EQ(copies.num_wrong(), 0);
}

// One process runs another program.
void AskForOther(int64_t rank, int64_t count) {
  CopyLayer copies(ShapeOf(count), true), direct(ShapeOf(count), false);
  Gpu gpu(0, 0, MemoryKind::kClassic);
  LayerShape shape = ShapeOf(count);
  shape.widths = {96, 28};
  CopyLayer other_sizes(shape, true);
  int64_t run = 1;
  for (CopyLayer* const other : {&direct, &other_sizes}) {
    const Ending ending = (rank == 0 ? *other : copies).Run(gpu, rank, run++);
    EXPECT_EQ(ending.code, XLA_FFI_Error_Code_INVALID_ARGUMENT);
    EXPECT(Has(ending.message, "requests other copies than rank"));
    Synchronize(gpu.stream());
  }
  ExpectOk(copies.Run(gpu, rank, run));
  Synchronize(gpu.stream());
  EXPECT_EQ(copies.num_wrong(), 0);
}

const ProcessParts kParts = {
    {"classic", CopyClassic},    {"mapped", CopyMapped},      {"visible", CopyVisible}, {"fail_kernel", FailKernel},
    {"reallocate", Reallocate},  {"end", RunUntilFailure},    {"never", NeverCome},     {"one_fails", OneFails},
    {"other", AskForOther},      {"many", BeginMany},         {"kinds", CopyKinds},     {"move", Move},
    {"die_copies", DieInCopies}, {"die_relays", DieInRelays}, {"die_plan", DieInPlan},  {"die_rows", DieInRows},
    {"groups", CopyInGroups},    {"lock", FailToLock},
};

// ---- the test ----------------------------------------------------------------------

// All but rank 1, which dies between start and join.
void OneDiesBetween(const std::string& program, const std::string& part, int64_t count) {
  const Clock::time_point begin = Clock::now();
  const auto children = StartProcesses(program, part, count);
  for (int64_t rank = 0; rank < count; ++rank) {
    EXPECT_EQ(children[static_cast<size_t>(rank)]->Succeeded(), rank != 1);
  }
  std::cerr << part << ": " << std::chrono::duration<double>(Clock::now() - begin).count() << " s" << std::endl;
}

// kill -9 allows no cleanup. The others end soon, with an error naming the process.
void OneIsKilled(const std::string& program, int64_t count, int64_t victim) {
  const auto children = StartProcesses(program, "end", count);
  for (const auto& child : children) EXPECT_EQ(child->ReadLine(), std::string("running"));
  const Clock::time_point begin = Clock::now();
  children[static_cast<size_t>(victim)]->Kill();
  const std::string code = std::to_string(XLA_FFI_Error_Code_INTERNAL) + " ";
  for (int64_t rank = 0; rank < count; ++rank) {
    if (rank == victim) continue;
    const std::string said = children[static_cast<size_t>(rank)]->ReadLine();
    // A process detecting the end ends too, and the last ones may detect this second end first.
    EXPECT(said.rfind(code, 0) == 0 && Has(said, " has ended (process "));
    EXPECT(rank > 0 || Has(said, "rank " + std::to_string(victim) + " of " + std::to_string(count)));
    EXPECT(children[static_cast<size_t>(rank)]->Succeeded());
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  std::cerr << "killed " << victim << " of " << count << ": the others ended within " << seconds << " s" << std::endl;
  EXPECT(seconds < kPatienceS);
}

std::set<std::string> FilesIn(const char* directory) {
  std::set<std::string> names;
  DIR* const opened = opendir(directory);
  while (const dirent* const entry = opened != nullptr ? readdir(opened) : nullptr) {
    if (Has(entry->d_name, "moe_lb") || Has(directory, "shm")) names.insert(entry->d_name);
  }
  if (opened != nullptr) closedir(opened);
  return names;
}

}  // namespace

// Without arguments, run the test; with a part and a number of processes, that part; a child also has its rank.
// `--parts` prints them, for ci/mutants.py.
int main(int argc, char** argv) {
  if (argc >= 4) return RunProcess(argv, kParts);
  const std::vector<std::pair<std::string, int64_t>> parts = {
      {"mapped", 2},      {"classic", 4},  {"mapped", 8},    {"reallocate", 3}, {"move", 3},
      {"many", 3},        {"never", 3},    {"one_fails", 3}, {"other", 3},      {"die_copies", 3},
      {"die_relays", 3},  {"die_plan", 3}, {"die_rows", 3},  {"end", 4},        {"visible", 3},
      {"fail_kernel", 3}, {"kinds", 2},    {"groups", 4},    {"lock", 2},
  };
  const auto before = std::make_pair(FilesIn("/dev/shm"), FilesIn("/tmp"));
  for (const auto& [part, count] : parts) {
    if (argc == 2) std::cout << part << " " << count << std::endl;
    if (argc == 2 || (argc == 3 && (part != argv[1] || count != std::stoll(argv[2])))) continue;
    if (part == "end") {
      OneIsKilled(argv[0], count, 2);
    } else {
      (part.rfind("die", 0) == 0 ? OneDiesBetween : ExpectAllSucceed)(argv[0], part, count);
    }
  }
  EXPECT(argc > 1 || std::make_pair(FilesIn("/dev/shm"), FilesIn("/tmp")) == before);
}
