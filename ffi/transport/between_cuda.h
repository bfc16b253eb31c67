// Copies between processes with one GPU each, in place of a rendezvous of devices.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "ffi/transport/mapped_memory_cuda.h"
#include "ffi/transport/peer_operands.h"
#include "ffi/transport/peer_table.h"
#include "ffi/transport/process_group_cuda.h"

namespace moe_lb::peer_cuda {

struct PendingCall;
struct CallArguments;

// A group of processes, from the side of this process's GPU. Each process queues only the copies into its own memory.
// It reads mapped memory of the others and writes none, so an ended process leaves only its own memory incomplete.
//
// Streams of two processes synchronize through words in the pages of the group. The writer's copy stream sets them, and
// the other's stream waits for them:
//   forwarded: a rank has received data for others to copy from it;
//   copied: a rank has received everything, and so has ended its reads of other ranks' weights.
// Ready weights need no word: a host announces a call when its tables have arrived, and they were computed after the
// weights. A stream waits only for work already queued (`WaitForQueued`), so streams cannot deadlock in any
// queueing order of the hosts.
class Between {
 public:
  // Returns the instance for this process's group; waits until all its processes call it, and locks their pages in
  // memory, which may synchronize the device. Call it in the initialize stage.
  static Outcome Of(const PeerAttributes& attributes, Between** between);

  // Returns the number of a new call. Call it on the launching thread.
  uint32_t Next() { return group_->Next(); }

  // Announces the call, waits for the other ranks, and queues the copies into this process.
  Outcome Meet(const PeerAttributes& attributes, const CallArguments& arguments, const Status& refusal);
  // Fails the call here and on the other ranks; queues no copies.
  Outcome Fail(uint32_t number, Outcome outcome, PendingCall* pending);

  // Makes a stream wait until a rank has completed all its copies of this call.
  Status WaitForReader(cudaStream_t stream, uint32_t number, size_t rank) const;

  Outcome WhyReleased(const std::string& site, uint32_t number) const { return group_->WhyReleased(site, number); }

 private:
  Between(ProcessGroup* group, int device);

  Status LockPages();
  Outcome Share(const PeerAttributes& attributes, const PeerShare& share, Announcement* announcement);
  Status MapShares(const PeerAttributes& attributes, const CallArguments& arguments, const std::vector<PeerTask>& tasks,
                   std::vector<PeerShare>* shares);
  Outcome Prepare(const PeerAttributes& attributes, const CallArguments& arguments, std::vector<PeerTask>* tasks,
                  std::vector<PeerShare>* shares);
  Outcome Queue(const PeerAttributes& attributes, const CallArguments& arguments, const PeerTable& table,
                const std::vector<PeerTask>& tasks);
  Outcome WaitForTask(const PeerAttributes& attributes, uint32_t number, size_t rank, size_t task,
                      cudaStream_t stream) const;
  Status End(const CallArguments& arguments) const;
  CUdeviceptr Word(size_t rank, const std::atomic<uint32_t>& word) const;

  ProcessGroup* const group_;
  const int device_;
  SharedMemory shared_;
  MappedMemory mapped_;
  std::vector<CUdeviceptr> pages_;  // device addresses
};

}  // namespace moe_lb::peer_cuda
