// Streams and events: a stream is a queue with a thread.
//
// Orders between threads are those of CUDA and no others: from the host to the work that it queues, along a stream,
// from an event's record to a wait for it, and from a stream or an event to the host that synchronises with it or is
// told that it is over. All of them are an acquire and a release that ThreadSanitizer sees; queues are filled and
// emptied unseen. So work that two streams do on one place without a wait between them is a data race in its report.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <random>

#include "ffi/testing/cuda/unseen.h"

// An event, as often as it was recorded. Events are never freed, since a stream may still wait for one that was
// destroyed, which CUDA allows.
struct CUevent_st {
  explicit CUevent_st(int on) : device(on) {}

  const int device;
  CUevent_st* next = nullptr;  // of all events, so that none is a leak
  std::atomic<uint64_t> recorded{0};
  std::atomic<uint64_t> reached{0};  // the last record that its stream has come to
};

struct CUstream_st {
  explicit CUstream_st(int on);

  void Push(std::function<void()> work);
  void End();  // returns at once; the stream ends when its work is done
  bool IsIdle() const;
  void Wait() const;  // for what has been pushed until now

  const int device;

 private:
  struct Node {
    std::function<void()> work;
    std::atomic<bool> sealed{false};  // orders what the host did before it pushed
    Node* next = nullptr;
  };

  void Run();
  void Link(Node* node);
  Node* Next();

  std::minstd_rand random_;
  Node* first_;  // done already
  Node* last_;
  std::atomic<uint64_t> pushed_{0};
  std::atomic<uint64_t> done_{0};
  moe_lb::testing::Bell more_;
};

namespace moe_lb::testing {

// Rings when an event is reached or a stream has done a piece of work.
Bell& Progress();

// The last record of an event.
uint64_t TicketOf(const CUevent_st& event);
bool IsReached(const CUevent_st& event, uint64_t ticket);

// Streams that exist, for what waits for all of them.
void WaitForAllStreams();
int64_t NumStreams();

}  // namespace moe_lb::testing
