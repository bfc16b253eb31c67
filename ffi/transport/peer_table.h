// Addresses of the weights of all ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ffi/common/status.h"
#include "ffi/common/view.h"
#include "ffi/transport/peer_copies.h"

namespace moe_lb {

// Arguments of one participant of a rendezvous: the arrays of its `R / participants` ranks, one after the other.
// Usually a participant has one rank.
struct PeerShare {
  int64_t device = 0;
  MatrixView<const int32_t> wanted{nullptr, 0, 0};
  MatrixView<const int32_t> relay{nullptr, 0, 0};
  // For rows: `wanted` is the source rank of each slot, and the participant has one rank.
  MatrixView<const int32_t> first{nullptr, 0, 0};
  MatrixView<const int32_t> size{nullptr, 0, 0};
  PeerWeights weights;
  std::vector<std::byte*> home;   // one array of [ranks, L, ...] per kind of weights, or the rows to read
  std::vector<std::byte*> slots;  // [ranks, P, ...], or the receive buffers of rows
};

// Addresses by rank. In one process, every pointer is valid on every device. Several processes map each other's memory
// and fill the same table.
class PeerTable {
 public:
  explicit PeerTable(std::vector<PeerShare> shares);

  const PeerWeights& weights() const { return shares_[0].weights; }
  size_t num_ranks() const { return num_ranks_; }
  int64_t device(size_t rank) const { return ShareOf(rank).device; }
  size_t participant(size_t rank) const { return rank / ranks_here_; }

  std::byte* Home(size_t rank, size_t kind, size_t index) const {
    return ShareOf(rank).home[kind] + Offset(rank, kind, weights().num_home, index);
  }
  std::byte* Slot(size_t rank, size_t kind, size_t index) const {
    return ShareOf(rank).slots[kind] + Offset(rank, kind, num_slots_, index);
  }
  std::byte* To(const PeerTask& task, const PeerPiece& piece) const {
    return Slot(task.to_rank, piece.kind, piece.to_slot) + piece.offset;
  }
  // Source address of a piece; nullptr for kZeros.
  std::byte* From(const PeerPiece& piece) const;

 private:
  const PeerShare& ShareOf(size_t rank) const { return shares_[participant(rank)]; }
  size_t Offset(size_t rank, size_t kind, size_t per_rank, size_t index) const {
    return ((rank % ranks_here_) * per_rank + index) * weights().expert_bytes[kind];
  }

  std::vector<PeerShare> shares_;
  size_t num_slots_;
  size_t num_ranks_;
  size_t ranks_here_;
};

// Return a failure naming the first difference between two participants. All must request the same copies of
// weights of the same sizes.
Status CheckEqualTables(const std::vector<PeerShare>& shares);

// Plan all copies listed by the tables of a share; see PlanPeerTasks and PlanRowTasks.
Status PlanTasks(const PeerShare& share, std::vector<PeerTask>* tasks);

}  // namespace moe_lb
