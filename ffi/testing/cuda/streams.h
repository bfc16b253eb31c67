// Streams and events: a stream is a queue with a thread.
//
// Memory order between threads is that of CUDA alone: from the host to its queued work, along a stream, from an
// event's record to a wait for it, and from a stream or event to the host synchronizing with it or querying its
// completion. Each is an acquire and a release visible to ThreadSanitizer; queue operations are invisible. So it
// reports a data race if two streams access one location without a wait between them.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <random>
#include <vector>

#include "ffi/testing/cuda/unseen.h"

// An event with all its records. Events are never freed: CUDA allows a stream to wait for a destroyed event.
struct CUevent_st {
  explicit CUevent_st(int on) : device(on) {}

  const int device;
  CUevent_st* next = nullptr;  // list of all events, so that none is reported as a leak
  std::atomic<uint64_t> recorded{0};
  std::atomic<uint64_t> reached{0};           // the last record reached by its stream
  std::atomic<const void*> capture{nullptr};  // of the last record, if it was captured
};

struct CUstream_st {
  explicit CUstream_st(int on);

  void Push(std::function<void()> work);
  // Work is appended to `recorded` instead; null ends that.
  void Record(std::vector<std::function<void()>>* recorded) { recorded_ = recorded; }
  const void* capture() const { return recorded_; }
  void End();  // returns at once; the stream ends after its queued work
  bool IsIdle() const;
  void Wait() const;  // for all work pushed so far

  const int device;

 private:
  struct Node {
    std::function<void()> work;
    std::atomic<bool> sealed{false};  // releases the host's writes before the push
    Node* next = nullptr;
  };

  void Run();
  void Link(Node* node);
  Node* Next();

  std::vector<std::function<void()>>* recorded_ = nullptr;
  std::minstd_rand random_;
  Node* first_;  // complete
  Node* last_;
  std::atomic<uint64_t> pushed_{0};
  std::atomic<uint64_t> done_{0};
  moe_lb::testing::Bell more_;
};

namespace moe_lb::testing {

// Rings after each reached event and each completed operation of a stream.
Bell& Progress();

// Returns the last record of an event.
uint64_t TicketOf(const CUevent_st& event);
bool IsReached(const CUevent_st& event, uint64_t ticket);

// True after `Corrupt`: streams then drop their work.
bool IsCorrupt();

// All existing streams, for device-wide synchronization.
void WaitForAllStreams();
int64_t NumStreams();

}  // namespace moe_lb::testing
