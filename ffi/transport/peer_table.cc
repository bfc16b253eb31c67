#include "ffi/transport/peer_table.h"

#include <utility>

#include "ffi/transport/peer_rows.h"

namespace moe_lb {
namespace {

// Checks equal tables: each rank computes its own. If one had another plan, copies from the table of rank 0 would fill
// its slots with weights of other experts, undetected.
Status CheckEqual(const char* name, size_t participant, MatrixView<const int32_t> here,
                  MatrixView<const int32_t> first) {
  if (here.rows() != first.rows() || here.columns() != first.columns()) {
    return Refuse(name, " has shape [", here.rows(), ", ", here.columns(), "] on rank ", participant, " and [",
                  first.rows(), ", ", first.columns(), "] on rank 0; expected the same table on all ranks");
  }
  for (size_t rank = 0; rank < first.rows(); ++rank) {
    for (size_t slot = 0; slot < first.columns(); ++slot) {
      if (here[rank][slot] == first[rank][slot]) continue;
      return Refuse(name, " of rank ", rank, ", slot ", slot, " is ", here[rank][slot], " on rank ", participant,
                    " and ", first[rank][slot], " on rank 0; expected the same table on all ranks");
    }
  }
  return Ok();
}

// Checks equal sizes: addresses on all ranks use the sizes of rank 0, so a different rank would be written out of
// bounds.
Status CheckEqualWeights(size_t participant, const PeerWeights& here, const PeerWeights& first) {
  if (here.expert_bytes.size() != first.expert_bytes.size()) {
    return Refuse("home has ", here.expert_bytes.size(), " kinds of weights on rank ", participant, " and ",
                  first.expert_bytes.size(), " on rank 0; expected equally many");
  }
  for (size_t kind = 0; kind < first.expert_bytes.size(); ++kind) {
    if (here.expert_bytes[kind] == first.expert_bytes[kind]) continue;
    return Refuse("home of kind ", kind, " has ", here.expert_bytes[kind], " bytes an expert on rank ", participant,
                  " and ", first.expert_bytes[kind], " on rank 0; expected equally many");
  }
  // The call is the same on all ranks, so either all or none copy rows.
  if (!first.rows || (here.rows->read == first.rows->read && here.rows->written == first.rows->written)) return Ok();
  return Refuse("rank ", participant, " has ", here.rows->read, " rows and room for ", here.rows->written,
                "; expected ", first.rows->read, " and ", first.rows->written, " as on rank 0");
}

}  // namespace

PeerTable::PeerTable(std::vector<PeerShare> shares)
    // Declared first because the other members are initialized from `shares_`. All participants have the same number of
    // ranks: PeerShareBuilder checks that they divide.
    : shares_(std::move(shares)),
      num_slots_(shares_[0].wanted.columns()),
      num_ranks_(shares_[0].wanted.rows()),
      ranks_here_(num_ranks_ / shares_.size()) {}

std::byte* PeerTable::From(const PeerPiece& piece) const {
  switch (piece.source) {
    case PeerSource::kZeros:
      return nullptr;
    case PeerSource::kHome:
      return Home(piece.from_rank, piece.kind, piece.from_index) + piece.offset;
    case PeerSource::kSlot:
      // The piece has the same offset in both slots, because a relay forwards the bytes it received.
      return Slot(piece.from_rank, piece.kind, piece.from_index) + piece.offset;
  }
  return nullptr;
}

Status CheckEqualTables(const std::vector<PeerShare>& shares) {
  for (size_t i = 1; i < shares.size(); ++i) {
    if (Status bad = CheckEqualWeights(i, shares[i].weights, shares[0].weights)) return bad;
    if (Status bad = CheckEqual("wanted", i, shares[i].wanted, shares[0].wanted)) return bad;
    if (Status bad = CheckEqual("relay", i, shares[i].relay, shares[0].relay)) return bad;
    if (Status bad = CheckEqual("first row", i, shares[i].first, shares[0].first)) return bad;
    if (Status bad = CheckEqual("rows", i, shares[i].size, shares[0].size)) return bad;
  }
  return Ok();
}

Status PlanTasks(const PeerShare& share, std::vector<PeerTask>* tasks) {
  if (share.weights.rows) return PlanRowTasks(share.wanted, share.first, share.size, share.weights, tasks);
  return PlanPeerTasks(share.wanted, share.relay, share.weights, tasks);
}

}  // namespace moe_lb
