// Waits that CUDA handlers need and no others, and the reuse of pinned memory and events, on the stand-in.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ffi/common/testing.h"
#include "ffi/testing/cuda/copy_layer.h"
#include "ffi/testing/cuda/layer_weights.h"
#include "ffi/testing/cuda/planned_layer.h"
#include "ffi/testing/cuda/stand_in.h"
#include "ffi/transport/gpu_cuda.h"

namespace {

using namespace moe_lb::testing;

// Without slots, no device reads the weights of another one.
template <typename Layer>
void ADeviceWaitsForItselfAlone(Layer layer, int64_t ranks) {
  const auto gpus = Gpus(ranks);
  const int64_t before = NumCalls("cudaStreamWaitEvent");
  OnAll(ranks, [&](int64_t rank) { ExpectOk(layer.Run(*gpus[static_cast<size_t>(rank)], rank, 1)); });
  for (const auto& gpu : gpus) Synchronize(gpu->stream());
  // The fetch waits for the tables, and the join for the copies.
  EXPECT_EQ(NumCalls("cudaStreamWaitEvent") - before, 2 * ranks);
  EXPECT_EQ(layer.num_wrong(), 0);
}

void ALayerWithoutSlotsWaitsForNoPeer() {
  LayerShape shape;
  shape.slots = 0;
  ADeviceWaitsForItselfAlone<CopyLayer&>(*std::make_unique<CopyLayer>(shape, false), shape.ranks);
  ADeviceWaitsForItselfAlone<PlannedLayer&>(*std::make_unique<PlannedLayer>(shape), shape.ranks);
}

// Resources of exactly the wanted size are taken, those first that were returned first.
void LaunchResourcesAreReusedInOrder() {
  using Pool = moe_lb::peer_cuda::Gpu;
  constexpr size_t kWords = 1 << 16;  // a size unique to this test, and a power of two
  Pool* pool = nullptr;
  EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
  EXPECT(!Pool::Current(&pool));
  const int64_t before = NumCalls("cudaHostAlloc");
  const auto num_allocated = [before] { return static_cast<size_t>(NumCalls("cudaHostAlloc") - before); };
  EXPECT(!pool->Prepare(kWords));
  EXPECT_EQ(num_allocated(), Pool::kNumLaunchResources);
  std::vector<std::shared_ptr<moe_lb::peer_cuda::LaunchResources>> taken(Pool::kNumLaunchResources);
  for (auto& one : taken) EXPECT(!pool->Take(kWords, &one));
  EXPECT_EQ(num_allocated(), Pool::kNumLaunchResources);
  const int32_t* const first = taken[3]->host;
  taken[3] = nullptr;
  taken.clear();
  taken.resize(1);
  EXPECT(!pool->Take(kWords, &taken[0]));
  EXPECT_EQ(taken[0]->host, first);
  pool->Launched(kWords);
}

// A join may pass its slots alone.
void AJoinNeedsNoOperandsBesideItsSlots() {
  Gpu gpu(0, 0);
  CallSite site(CudaXla(), CudaHandler("moe_lb_copy_join"), {});
  Program program(gpu, 1);
  const DeviceArray ticket = program.New(XLA_FFI_DataType_S32, {2}), slots = program.New(XLA_FFI_DataType_BF16, {2, 8});
  program.Execute(program.Add(site, {ticket, slots}, {slots}));
  EXPECT_EQ(program.ending().message.rfind("slots are not the buffers of a start in this run", 0), size_t{0});
}

}  // namespace

int main(int argc, char** argv) {
  const int status = moe_lb::RunParts(argc, argv,
                                      {{"no_slots", ALayerWithoutSlotsWaitsForNoPeer},
                                       {"two_streams", PlanOnTwoStreams},
                                       {"reuse", LaunchResourcesAreReusedInOrder},
                                       {"join", AJoinNeedsNoOperandsBesideItsSlots}});
  for (const std::string& violation : Violations()) EXPECT_EQ(violation, std::string());
  return status;
}
