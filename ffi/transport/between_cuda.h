// Processes with one GPU each copy from each other: what their calls do instead of a meeting of devices.
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

// A group of processes, as this one's GPU sees it. Each process queues only the copies into its own memory: it reads
// mapped memory of the others and writes none, so that what a process that ends leaves half done is its own.
//
// Orders between streams of two processes go through words in the pages of the group, which the writer's copy stream
// sets and the other's stream waits for:
//   forwarded: a rank has received what others copy on from it;
//   copied: a rank has received everything, and so reads nobody's weights any more.
// That weights are ready needs no word: a host announces a call when its tables have come, and they were computed
// after. A stream waits only for what is queued already (`WaitForQueued`), so that streams cannot wait for each other
// in a circle, in whatever order hosts queue.
class Between {
 public:
  // For the initialize stage: waits until all processes of this one's group have come to theirs, and locks their pages
  // in memory, which may wait for the device.
  static Outcome Of(const PeerAttributes& attributes, Between** between);

  // On the thread that launches programs: numbers a call.
  uint32_t Next() { return group_->Next(); }

  // Announces the call, waits for the others, and queues the copies into this process.
  Outcome Meet(const PeerAttributes& attributes, const CallArguments& arguments, const Status& refusal);
  // Ends the call here and with the others; nothing of it is queued.
  Outcome Fail(uint32_t number, Outcome outcome, PendingCall* pending);

  // Makes a stream wait until a rank has copied all that it copies in this call.
  Status WaitForReader(cudaStream_t stream, uint32_t number, size_t rank) const;

  Status WhyReleased(const std::string& site, uint32_t number) const { return group_->WhyReleased(site, number); }

 private:
  Between(ProcessGroup* group, int device);

  Status LockPages();
  Status Share(const PeerShare& share, Announcement* announcement);
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
  std::vector<CUdeviceptr> pages_;  // as the device sees them
};

}  // namespace moe_lb::peer_cuda
