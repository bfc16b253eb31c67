#include "ffi/testing/cuda/streams.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/testing/cuda/stand_in.h"

namespace moe_lb::testing {
namespace {

struct All {
  std::mutex mutex;
  std::vector<CUstream_st*> streams;
};

// Leaked on purpose: streams outlive static objects.
All& AllStreams() {
  static All* const all = new All;
  return *all;
}

}  // namespace

Bell& Progress() {
  static Bell* const bell = new Bell;
  return *bell;
}

// Relaxed: a record by one host thread does not order a wait by another.
uint64_t TicketOf(const CUevent_st& event) { return event.recorded.load(std::memory_order_relaxed); }

bool IsReached(const CUevent_st& event, uint64_t ticket) {
  return event.reached.load(std::memory_order_acquire) >= ticket;
}

void WaitForAllStreams() {
  std::vector<CUstream_st*> streams;
  {
    const std::lock_guard<std::mutex> lock(AllStreams().mutex);
    streams = AllStreams().streams;
  }
  for (const CUstream_st* stream : streams) stream->Wait();
}

int64_t NumStreams() {
  const std::lock_guard<std::mutex> lock(AllStreams().mutex);
  return static_cast<int64_t>(AllStreams().streams.size());
}

}  // namespace moe_lb::testing

using namespace moe_lb::testing;

CUstream_st::CUstream_st(int on) : device(on), random_(static_cast<unsigned>(on) * 977 + 1), first_(new Node) {
  last_ = first_;
  {
    const std::lock_guard<std::mutex> lock(AllStreams().mutex);
    AllStreams().streams.push_back(this);
  }
  std::thread([this] { Run(); }).detach();
}

void CUstream_st::Push(std::function<void()> work) {
  if (recorded_ != nullptr) return recorded_->push_back(std::move(work));
  Node* const node = new Node;
  node->work = std::move(work);
  pushed_.fetch_add(1, std::memory_order_relaxed);
  node->sealed.store(true, std::memory_order_release);
  Link(node);
  more_.Ring();
}

void CUstream_st::End() {
  {
    const std::lock_guard<std::mutex> lock(AllStreams().mutex);
    auto& streams = AllStreams().streams;
    streams.erase(std::find(streams.begin(), streams.end(), this));
  }
  Push(nullptr);
}

bool CUstream_st::IsIdle() const {
  return done_.load(std::memory_order_acquire) >= pushed_.load(std::memory_order_relaxed);
}

void CUstream_st::Wait() const {
  const uint64_t until = pushed_.load(std::memory_order_relaxed);
  Progress().Until([&] { return done_.load(std::memory_order_acquire) >= until; });
}

MOE_LB_UNSEEN void CUstream_st::Link(Node* node) {
  Node* const before = __atomic_exchange_n(&last_, node, __ATOMIC_ACQ_REL);
  __atomic_store_n(&before->next, node, __ATOMIC_RELEASE);
}

MOE_LB_UNSEEN CUstream_st::Node* CUstream_st::Next() { return __atomic_load_n(&first_->next, __ATOMIC_ACQUIRE); }

void CUstream_st::Run() {
  for (;;) {
    Node* node = nullptr;
    more_.Until([&] { return (node = Next()) != nullptr; });
    static_cast<void>(node->sealed.load(std::memory_order_acquire));
    delete first_;
    first_ = node;
    if (!node->work) break;
    if (const int64_t longest = TheStandIn().longest_delay_us; longest > 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(random_() % static_cast<uint64_t>(longest)));
    }
    if (!IsCorrupt()) node->work();
    node->work = nullptr;
    done_.fetch_add(1, std::memory_order_release);
    Progress().Ring();
  }
  delete first_;
  delete this;
}
