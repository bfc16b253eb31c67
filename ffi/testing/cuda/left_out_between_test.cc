// Every wait and record of copies between processes is necessary: without it values are wrong, a wait hangs, or a
// failure is not reported.
//
// A group of processes runs each case, and all of them ignore one place in the code. The list of places comes from the
// stand-in after a run of everything; places that devices of one process reach too are in `left_out_test`.
// ThreadSanitizer sees only one process, so the values decide here.
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "ffi/common/testing.h"
#include "ffi/testing/cuda/copy_layer.h"
#include "ffi/testing/cuda/layer_weights.h"
#include "ffi/testing/cuda/planned_layer.h"
#include "ffi/testing/cuda/processes.h"
#include "ffi/testing/cuda/stand_in.h"
#include "ffi/transport/neighbours_cuda.h"
#include "ffi/transport/process_group_cuda.h"

extern const char __executable_start;

namespace {

using namespace moe_lb::testing;

constexpr int64_t kCount = 3;

LayerShape Shape(std::vector<int64_t> widths) {
  LayerShape shape;
  shape.ranks = kCount;
  shape.processes = ProcessesUpTo(kCount);
  shape.widths = std::move(widths);
  shape.timeout_s = 4;
  return shape;
}

// Places of ordering calls, equal in every process.
std::set<std::string> Places() {
  std::set<std::string> places;
  for (const CallPlace& place : OrderingCalls()) {
    const auto offset = static_cast<const char*>(place.returns_to) - &__executable_start;
    places.insert(std::string(place.function) + " " + std::to_string(offset));
  }
  return places;
}

// Delays one rank after the other: its copies, or the GPU work before them.
void CopyWithLateRanks(Gpu& gpu, int64_t rank) {
  CopyLayer relays(Shape({96, 24}), true);
  PlannedLayer planned(Shape({96, 24}));
  for (int64_t run = 1; run <= 9; ++run) {
    TheStandIn().copy_us = rank == run % kCount ? 3000 : 0;
    ExpectOk(relays.Run(gpu, rank, run));
    ExpectOk(planned.Run(gpu, rank, run));
    if (run % 3 == 0) Synchronize(gpu.stream());
  }
  TheStandIn().copy_us = 2000;
  Between between;
  between.fails = true;
  ExpectOk(relays.Run(gpu, rank, 10, between));
  ExpectOk(planned.Run(gpu, rank, 11, between));
  EXPECT_EQ(relays.num_wrong() + planned.num_wrong(), 0);
}

// See processes_test.
void BeginMany(Gpu& gpu, int64_t rank) {
  CopyLayer many_chunks(Shape({400, 400}), true), few_chunks(Shape({8}), true);
  std::vector<CopyLayer*> layers(4, &many_chunks);
  layers.resize(24, &few_chunks);
  TheStandIn().copy_us = rank == kCount - 1 ? 2000 : 0;
  ExpectOk(CopyLayer::RunAll(layers, gpu, rank, 20));
  Synchronize(gpu.stream());
  TheStandIn().copy_us = 0;
  EXPECT_EQ(many_chunks.num_wrong() + few_chunks.num_wrong(), 0);
}

void FailInTheMiddle(Gpu& gpu, int64_t rank) {
  CopyLayer relays(Shape({960, 240}), true);
  // The progress of the others by then is random.
  for (int64_t run = 30; run < 50; ++run) {
    if (rank == 1) FailCalls("cuMemcpyBatchAsync", 20, cudaErrorIllegalAddress);
    const Ending ending = relays.Run(gpu, rank, run);
    FailCalls("", 0, cudaSuccess);
    EXPECT(rank == 0 || ending.code == XLA_FFI_Error_Code_INTERNAL);
    Synchronize(gpu.stream());
  }
}

// left_out: "", a kind of host wait, or a place.
int RunAll(int64_t rank, const std::string& left_out) {
  // A hang is a failure too.
  alarm(12);
  MeetOthers(rank, kCount);
  const std::set<std::string> host_waits = {"ring", "all", "queued"};
  if (host_waits.count(left_out) > 0) {
    moe_lb::ProcessGroup* group = nullptr;
    EXPECT(!moe_lb::ProcessGroup::Of(&moe_lb::Neighbours::OfProcess(), ProcessesUpTo(kCount), "pages", 30, &group)
                .failure);
    group->LeaveOut(left_out);
  } else if (!left_out.empty()) {
    Ignore({"", &__executable_start + std::stoll(left_out)});
  }
  {
    Gpu gpu(0, 0, MemoryKind::kMapped);
    CopyWithLateRanks(gpu, rank);
    BeginMany(gpu, rank);
    FailInTheMiddle(gpu, rank);
  }
  for (const std::string& violation : Violations()) EXPECT_EQ(violation, std::string());
  for (const std::string& place : Places()) std::cout << place << std::endl;
  return 0;
}

// The same with devices of this process.
std::set<std::string> PlacesInside() {
  LayerShape shape = Shape({96, 24});
  shape.processes.clear();
  CopyLayer relays(shape, true);
  PlannedLayer planned(shape);
  const auto gpus = Gpus(kCount);
  Between between;
  for (int64_t run = 1; run <= 2; ++run) {
    OnAll(kCount, [&](int64_t rank) {
      ExpectOk(relays.Run(*gpus[static_cast<size_t>(rank)], rank, run, between));
      ExpectOk(planned.Run(*gpus[static_cast<size_t>(rank)], rank, run, between));
    });
    between.fails = true;
  }
  return Places();
}

bool Succeed(const std::string& program, const std::string& left_out, std::set<std::string>* places) {
  bool all = true;
  const auto children = StartProcesses(program, "run", kCount, left_out);
  for (const auto& child : children) {
    for (std::string line = child->ReadLine(); !line.empty(); line = child->ReadLine()) places->insert(line);
    all = child->Succeeded() && all;
  }
  return all;
}

int TryAll(const std::string& program) {
  std::set<std::string> places, ignored;
  EXPECT(Succeed(program, "", &places));
  for (const std::string& place : PlacesInside()) places.erase(place);
  for (const char* const host_wait : {"ring", "all", "queued"}) places.insert(std::string("host ") + host_wait);
  bool all_needed = true;
  for (const std::string& place : places) {
    std::istringstream words(place);
    std::string function, where;
    words >> function >> where;
    bool fails = false;
    for (int attempt = 0; attempt < 3 && !fails; ++attempt) fails = !Succeed(program, where, &ignored);
    std::cerr << function << " " << where << (fails ? ": needed" : ": NOT NEEDED") << std::endl;
    all_needed = all_needed && fails;
  }
  EXPECT(places.size() >= 8);
  return all_needed ? 0 : 1;
}

}  // namespace

// Without arguments, try all places; with "nothing", leave nothing out; else run as started by StartProcesses.
int main(int argc, char** argv) {
  if (argc == 2 && argv[1] == std::string("--parts")) return std::puts("nothing") < 0 ? 1 : 0;
  if (argc == 2) {
    std::set<std::string> places;
    return Succeed(argv[0], "", &places) ? 0 : 1;
  }
  return argc < 5 ? TryAll(argv[0]) : RunAll(std::stoll(argv[2]), argv[4]);
}
