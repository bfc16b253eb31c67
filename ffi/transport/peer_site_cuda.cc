#include "ffi/transport/peer_site_cuda.h"

#include <algorithm>

#include "ffi/transport/copier.h"

namespace moe_lb::peer_cuda {

// ---- pending calls ------------------------------------------------------------------

void PendingCall::End(const Outcome& how) {
  const std::lock_guard<std::mutex> lock(mutex_);
  outcome_ = how;
  changed_.notify_all();
}

Outcome PendingCall::Wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return outcome_.has_value(); });
  return *outcome_;
}

Status PendingCall::JoinOn(cudaStream_t stream) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (std::exchange(joined_, true)) return Ok();
  }
  Status bad;
  const auto wait = [&](const Event& event) {
    const Status failed = Cuda(cudaStreamWaitEvent(stream, event.get(), 0), "cudaStreamWaitEvent");
    if (!bad) bad = failed;
  };
  for (const std::shared_ptr<LaunchResources>& other : awaited) wait(other->copied);
  awaited.clear();
  for (const size_t reader : readers) {
    const Status failed = between->WaitForReader(stream, number, reader);
    if (!bad) bad = failed;
  }
  if (fetching != nullptr) {
    // An abandoned fetch still reads the program's buffers. The record after it may have failed, so record again.
    const Status failed = Cuda(cudaEventRecord(fetching->tables.get(), fetching->gpu->fetches()), "cudaEventRecord");
    if (!bad) bad = failed;
    wait(fetching->tables);
    fetching = nullptr;
  }
  return bad;
}

bool PendingCall::is_joined() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return joined_;
}

PeerTickets<std::shared_ptr<PendingCall>>& OpenTickets() {
  static auto* const tickets = new PeerTickets<std::shared_ptr<PendingCall>>;
  return *tickets;
}

int64_t TicketOf(int32_t device, const Addresses& slots) {
  for (const void* slot : slots) {
    if (slot != nullptr) return static_cast<int64_t>(reinterpret_cast<intptr_t>(slot));
  }
  return -1 - device;
}

xf::TypeId PendingJoins::id = {};
xf::TypeInfo PendingJoins::info = xf::MakeTypeInfo<PendingJoins>();

void PendingJoins::Add(const std::shared_ptr<PendingCall>& pending) {
  // A loop adds one call per iteration, so joined calls are removed.
  const auto is_joined = [](const auto& one) { return one->is_joined(); };
  calls_.erase(std::remove_if(calls_.begin(), calls_.end(), is_joined), calls_.end());
  calls_.push_back(pending);
}

PendingJoins::~PendingJoins() {
  gpu_->Launched(words_);
  for (const std::shared_ptr<PendingCall>& pending : calls_) {
    if (pending->is_joined()) continue;
    // Another device may queue copies into this one until the rendezvous ends.
    static_cast<void>(pending->Wait());
    // An error means that the device has stopped, so there is no work to wait for.
    static_cast<void>(pending->JoinOn(stream_));
    if (pending->forget) pending->forget();
    std::shared_ptr<PendingCall> open;
    static_cast<void>(OpenTickets().Close(pending->run_id, pending->ticket, &open));
  }
}

// ---- call sites --------------------------------------------------------------------

Outcome Site::Prepare() {
  if (attributes.processes.empty() || between.load() != nullptr) return {};
  Between* found = nullptr;
  const Outcome outcome = Between::Of(attributes, &found);
  if (!outcome.failure) between = found;
  return outcome;
}

void Site::Begin(PendingCall* pending) const {
  pending->between = between;
  if (pending->between != nullptr) pending->number = pending->between->Next();
}

void Site::Meet(const Arrival& who, CallArguments arguments, Status refusal) {
  const std::shared_ptr<PendingCall> pending = arguments.pending;
  if (pending->between != nullptr) return pending->End(pending->between->Meet(attributes, arguments, refusal));
  rendezvous.Arrive(who, std::move(arguments), std::move(refusal),
                    [pending](const Outcome& how) { pending->End(how); });
}

void Site::Fail(PendingCall* pending, Outcome outcome) {
  const Outcome named = {At(attributes.site, *outcome.failure), outcome.timed_out};
  if (pending->between != nullptr) return pending->End(pending->between->Fail(pending->number, named, pending));
  rendezvous.FailRun(pending->run_id, outcome);
  pending->End(named);
}

// ---- fetches -------------------------------------------------------------------------

Status QueueFetch(cudaStream_t stream, const int32_t* place, const std::vector<View<const int32_t>>& fetched,
                  size_t more_words, std::shared_ptr<LaunchResources>* resources) {
  size_t words = kPlaceWords + more_words;
  for (const View<const int32_t>& part : fetched) words += part.size();
  Gpu* gpu = nullptr;
  if (Status bad = Gpu::Current(&gpu)) return bad;
  if (Status bad = gpu->Take(words, resources)) return bad;
  const cudaStream_t fetches = gpu->fetches();
  // XLA's stream computes the tables and the weights, and uses the slots' memory for other arrays until here. So all of
  // that is complete when the tables are on the host.
  MOE_LB_CUDA(cudaEventRecord((*resources)->ready.get(), stream));
  MOE_LB_CUDA(cudaStreamWaitEvent(fetches, (*resources)->ready.get(), 0));
  int32_t* to = (*resources)->host;
  MOE_LB_CUDA(CopyWords(to, place, kPlaceWords, cudaMemcpyDeviceToHost, fetches));
  to += kPlaceWords;
  for (const View<const int32_t>& part : fetched) {
    MOE_LB_CUDA(CopyWords(to, part.data(), part.size(), cudaMemcpyDeviceToHost, fetches));
    to += part.size();
  }
  MOE_LB_CUDA(cudaEventRecord((*resources)->tables.get(), fetches));
  return Ok();
}

// Waits until the fetch recorded by `resources->tables` is complete: microseconds, unless the device lags behind.
static Outcome WaitForHost(const LaunchResources& resources, const PeerAttributes& attributes, int64_t device) {
  bool is_late = false;
  const Status bad = resources.tables.Await(attributes.timeout_s, &is_late);
  if (!is_late) return {bad, false};
  return {Refuse("device ", device, " did not bring its tables to the host within ", attributes.timeout_s,
                 " s; expected it to make progress"),
          true};
}

void Abandon(Site* site, const CallArguments& arguments, const Outcome& outcome) {
  arguments.pending->fetching = arguments.resources;
  site->Fail(arguments.pending.get(), outcome);
}

void MeetWhenFetched(const std::shared_ptr<Site>& site, xf::RunId run, int32_t device, CallArguments arguments,
                     Show show) {
  Copier* copier = nullptr;
  if (Status bad = Copiers::Of(device, &copier)) return Abandon(site.get(), arguments, {bad, false});
  copier->Enqueue([=, arguments = std::move(arguments), show = std::move(show)]() mutable {
    // A new thread starts on device 0, where the first call would make a context: hundreds of megabytes.
    Outcome fetched = {Cuda(cudaSetDevice(arguments.resources->gpu->device()), "cudaSetDevice"), false};
    if (!fetched.failure) fetched = WaitForHost(*arguments.resources, site->attributes, device);
    if (fetched.failure) return Abandon(site.get(), arguments, fetched);
    // Arrive with a refusal too, so that the other devices do not wait.
    Status refusal = show(&arguments.share);
    const Arrival who = ArrivalOf(run, device, arguments.resources->host);
    site->Meet(who, std::move(arguments), std::move(refusal));
  });
}

Status PassOn(cudaStream_t stream, const xf::AnyBuffer& in, const xf::AnyBuffer& out) {
  if (Status bad = CheckSame("bytes", in.size_bytes(), out.size_bytes())) return bad;
  if (in.untyped_data() == out.untyped_data() || in.size_bytes() == 0) return Ok();
  MOE_LB_CUDA(
      cudaMemcpyAsync(out.untyped_data(), in.untyped_data(), in.size_bytes(), cudaMemcpyDeviceToDevice, stream));
  return Ok();
}

cudaError_t CopyWords(int32_t* to, const int32_t* from, size_t words, cudaMemcpyKind kind, cudaStream_t stream) {
  return words == 0 ? cudaSuccess : cudaMemcpyAsync(to, from, words * sizeof(int32_t), kind, stream);
}

}  // namespace moe_lb::peer_cuda
