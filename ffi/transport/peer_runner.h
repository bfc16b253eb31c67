// Peer copies and sums on the CPU, run by the copiers of the receiving devices.
#pragma once

#include <functional>
#include <vector>

#include "ffi/transport/peer_copies.h"
#include "ffi/transport/peer_table.h"

namespace moe_lb {

// Run the tasks, each on the copier of the receiving device after its dependencies. Returns at once. `done` is called
// once, on any thread, after the last task. The memory of `table` must live until then. Fails, without a call of
// `done`, if a copier cannot be started; then no task runs, nor if it throws for want of memory.
Status RunPeerTasks(std::vector<PeerTask> tasks, PeerTable table, std::function<void()> done);

// Run the transpose: `home` of every rank receives the sums over the slots holding its experts, in the order of
// ReplicasOf; 0 for an expert without replicas. `numbers` has one entry per kind of weights. Returns at once, as above.
Status RunPeerSums(MatrixView<const int32_t> wanted, const std::vector<PeerNumber>& numbers, PeerTable table,
                   std::function<void()> done);

}  // namespace moe_lb
