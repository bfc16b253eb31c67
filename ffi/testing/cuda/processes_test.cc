// Peer copies between processes, one stand-in GPU each, whose memory the others map: values, messages, reallocated
// memory, and processes failing, ending or never arriving.
#include "ffi/testing/cuda/processes.h"

#include <dirent.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
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

bool Has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

LayerShape ShapeOf(int64_t count) {
  LayerShape shape;
  shape.ranks = count;
  shape.processes = ProcessesUpTo(count);
  return shape;
}

void ExpectOk(const Ending& ending) { EXPECT_EQ(ending.message, std::string()); }

void ExpectNoViolations() {
  for (const std::string& violation : Violations()) EXPECT_EQ(violation, std::string());
}

int64_t NumSent() { return moe_lb::Neighbours::OfProcess().num_sent(); }

// ---- parts of each process ---------------------------------------------------------

// All kinds of calls. In later runs the arrays are elsewhere in the same memory, and no notes are sent.
void CopyAll(int64_t rank, int64_t count, MemoryKind kind) {
  CopyLayer copies(ShapeOf(count), false), relays(ShapeOf(count), true);
  PlannedLayer planned(ShapeOf(count));
  RowsLayer onward(ShapeOf(count), false), back(ShapeOf(count), true);
  Gpu gpu(0, 0, kind);
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
}

void CopyClassic(int64_t rank, int64_t count) { CopyAll(rank, count, MemoryKind::kClassic); }
void CopyMapped(int64_t rank, int64_t count) { CopyAll(rank, count, MemoryKind::kMapped); }

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
  Gpu gpu(0, 0, rank % 2 == 0 ? MemoryKind::kClassic : MemoryKind::kMapped);
  for (int64_t run = 1; run <= 6; ++run) {
    ExpectOk(copies.Run(gpu, rank, run));
    Synchronize(gpu.stream());
    EXPECT_EQ(copies.num_wrong(), 0);
    // Freed memory is unmapped before other memory of the same process is mapped.
    EXPECT(NumMapped() <= count - 1);
    if (run % 2 == rank % 2) gpu.ReallocateShared();
  }
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

// One process runs another program.
void AskForOther(int64_t rank, int64_t count) {
  CopyLayer copies(ShapeOf(count), true), direct(ShapeOf(count), false);
  Gpu gpu(0, 0, MemoryKind::kClassic);
  const Ending ending = (rank == 0 ? direct : copies).Run(gpu, rank, 1);
  EXPECT_EQ(ending.code, XLA_FFI_Error_Code_INVALID_ARGUMENT);
  EXPECT(Has(ending.message, "requests other copies than rank"));
  Synchronize(gpu.stream());
  ExpectOk(copies.Run(gpu, rank, 2));
  Synchronize(gpu.stream());
  EXPECT_EQ(copies.num_wrong(), 0);
}

using Part = void (*)(int64_t rank, int64_t count);
const std::map<std::string, Part> kParts = {
    {"classic", CopyClassic}, {"mapped", CopyMapped},  {"reallocate", Reallocate}, {"end", RunUntilFailure},
    {"never", NeverCome},     {"one_fails", OneFails}, {"other", AskForOther},     {"many", BeginMany},
};

// ---- the test ----------------------------------------------------------------------

void ExpectAllSucceed(const std::string& program, const std::string& part, int64_t count) {
  const Clock::time_point begin = Clock::now();
  for (const auto& child : StartProcesses(program, part, count)) EXPECT(child->Succeeded());
  std::cerr << part << " " << count << ": " << std::chrono::duration<double>(Clock::now() - begin).count() << " s"
            << std::endl;
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

// Without arguments, run the test. Else: the part, the rank and the number of processes.
int main(int argc, char** argv) {
  if (argc >= 4) {
    // A hang is a failure too.
    alarm(120);
    const int64_t rank = std::stoll(argv[2]), count = std::stoll(argv[3]);
    MeetOthers(rank, count);
    kParts.at(argv[1])(rank, count);
    ExpectNoViolations();
    // Other processes may still read this process's page.
    std::cout << "done" << std::endl;
    return 0;
  }
  const auto before = std::make_pair(FilesIn("/dev/shm"), FilesIn("/tmp"));
  for (const int64_t count : {2, 4, 8}) ExpectAllSucceed(argv[0], count == 4 ? "classic" : "mapped", count);
  for (const char* const part : {"reallocate", "many", "never", "one_fails", "other"})
    ExpectAllSucceed(argv[0], part, 3);
  OneIsKilled(argv[0], 4, 2);
  EXPECT(std::make_pair(FilesIn("/dev/shm"), FilesIn("/tmp")) == before);
}
