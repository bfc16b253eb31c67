#include "ffi/testing/cuda/gpu_program.h"

#include <cstdlib>
#include <iostream>
#include <thread>
#include <utility>

#include "ffi/planning/handlers.h"
#include "ffi/testing/cuda/stand_in.h"
#include "ffi/transport/peer_handlers.h"
#include "ffi/transport/peer_planning.h"

namespace moe_lb::testing {
namespace {

const std::vector<Registrations>& AllParts() {
  static const auto* const parts = new std::vector<Registrations>{
      PlanningRegistrations(), PlanningKernelRegistrations(), PeerRegistrations(), PeerPlanningRegistrations()};
  return *parts;
}

FakeXla* NewXla() {
  auto* const xla = new FakeXla;
  for (const Registrations& part : AllParts()) {
    if (const auto bad = xla->Register(part)) {
      std::cerr << *bad << std::endl;
      std::abort();
    }
  }
  return xla;
}

}  // namespace

FakeXla& CudaXla() {
  static FakeXla* const xla = NewXla();
  return *xla;
}

HandlerRegistration CudaHandler(const std::string& name) {
  for (const Registrations& part : AllParts()) {
    for (const HandlerRegistration& handler : part.handlers) {
      if (name == handler.name) return handler;
    }
  }
  std::cerr << "there is no handler " << name << std::endl;
  std::abort();
}

namespace {

constexpr size_t kSharedBytes = 1 << 20;

}  // namespace

Gpu::Gpu(int32_t ordinal, int cuda_device, std::optional<MemoryKind> shared)
    : ordinal_(ordinal), cuda_device_(cuda_device), kind_(shared) {
  static_cast<void>(cudaSetDevice(cuda_device));
  if (kind_) shared_ = NewAllocation(kSharedBytes, *kind_);
  static_cast<void>(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
}

Gpu::~Gpu() {
  Synchronize(stream_);
  static_cast<void>(cudaStreamDestroy(stream_));
  for (void* memory : all_) std::free(memory);
  // XLA's pool of classic memory lives until the process ends, because others may have it open.
  if (kind_ == MemoryKind::kMapped) FreeAllocation(shared_);
}

void* Gpu::Allocate(size_t size) {
  if (!kind_) {
    all_.push_back(std::malloc(size));
    return all_.back();
  }
  char* const at = shared_.begin + used_;
  used_ += (size + 63) / 64 * 64;
  if (used_ > shared_.size) std::abort();  // larger than any test needs
  return at;
}

void Gpu::ReallocateShared() {
  char* const at = shared_.begin;
  FreeAllocation(shared_);
  shared_ = NewAllocation(kSharedBytes, *kind_, at);
}

void Gpu::MoveShared() {
  const Allocation old = shared_;
  shared_ = NewAllocation(kSharedBytes, *kind_);
  FreeAllocation(old);
  used_ = 0;
  free_.clear();
}

DeviceArray Gpu::New(XLA_FFI_DataType dtype, std::vector<int64_t> dims) {
  DeviceArray array = {dtype, std::move(dims), nullptr};
  // XLA passes a null pointer for an empty array.
  if (array.size_bytes() == 0) return array;
  std::vector<void*>& free = free_[array.size_bytes()];
  if (free.empty()) {
    free.push_back(Allocate(array.size_bytes()));
  }
  array.data = free.back();
  free.pop_back();
  return array;
}

void Gpu::Free(const DeviceArray& array) {
  if (array.data != nullptr) free_[array.size_bytes()].push_back(array.data);
}

Program::Program(Gpu& gpu, int64_t run_id) : gpu_(gpu), run_id_(run_id) {
  // XLA sets the device's context on its thread.
  static_cast<void>(cudaSetDevice(gpu.cuda_device()));
}

Program::~Program() {
  invocations_.clear();
  for (const DeviceArray& array : arrays_) gpu_.Free(array);
}

DeviceArray Program::New(XLA_FFI_DataType dtype, std::vector<int64_t> dims) {
  arrays_.push_back(gpu_.New(dtype, std::move(dims)));
  return arrays_.back();
}

Invocation& Program::Add(CallSite& site, DeviceArrays args, DeviceArrays rets) {
  invocations_.push_back(
      std::make_unique<Invocation>(site, std::move(args), std::move(rets), run_id_, gpu_.ordinal(), gpu_.stream()));
  if (ending_.ok) ending_ = invocations_.back()->initialized();
  return *invocations_.back();
}

void Program::Execute(Invocation& invocation) {
  const Executing executing;
  if (ending_.ok) ending_ = invocation.Execute();
}

void Program::Launch(std::function<void()> kernel) {
  if (ending_.ok) testing::Launch(gpu_.stream(), std::move(kernel));
}

void Program::BlockHost() {
  if (ending_.ok) Synchronize(gpu_.stream());
}

void OnAll(int64_t num_devices, const std::function<void(int64_t device)>& on_device) {
  std::vector<std::thread> threads;
  for (int64_t device = 0; device < num_devices; ++device) threads.emplace_back([&, device] { on_device(device); });
  for (std::thread& thread : threads) thread.join();
}

std::vector<std::unique_ptr<Gpu>> Gpus(int64_t count) {
  std::vector<std::unique_ptr<Gpu>> gpus;
  for (int32_t device = 0; device < count; ++device) gpus.push_back(std::make_unique<Gpu>(device, device));
  return gpus;
}

}  // namespace moe_lb::testing
