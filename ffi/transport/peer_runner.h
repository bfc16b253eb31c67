// Peer copies and sums done by the copiers of the devices that receive: what a CPU has for copy engines.
#pragma once

#include <functional>
#include <vector>

#include "ffi/transport/peer_copies.h"
#include "ffi/transport/peer_table.h"

namespace moe_lb {

// Does the tasks, each on the copier of the receiving device as soon as what it waits for is done. Returns at once;
// `done` is called once, on any thread, when all are done. Until then the memory of `table` must live.
void RunPeerTasks(std::vector<PeerTask> tasks, PeerTable table, std::function<void()> done);

// The transpose: `home` of every rank becomes the sums of what is in the slots that hold its experts, in the order of
// ReplicasOf; 0 for an expert without replicas. `numbers` has one entry per kind of weights. Returns at once, as above.
void RunPeerSums(MatrixView<const int32_t> wanted, const std::vector<PeerNumber>& numbers, PeerTable table,
                 std::function<void()> done);

}  // namespace moe_lb
