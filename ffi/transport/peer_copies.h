// Copy plan for expert weights: pieces and their order. Depends on neither XLA nor CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "ffi/common/status.h"
#include "ffi/common/view.h"

namespace moe_lb {

// Rows of tokens instead of weights, see peer_rows.h.
struct PeerRows {
  size_t read;     // rows of each source array
  size_t written;  // rows of each destination array
  bool back;       // from takers to homes
};

// The kinds of weights copied together (up, gate, down), and their division into chunks.
struct PeerWeights {
  size_t num_home;                   // L, home experts of a rank
  std::vector<size_t> expert_bytes;  // of one expert, one entry per kind
  size_t chunk_bytes;                // bytes forwarded at once by a relay, at least 1
  // If set, the arrays are rows to read and write, and `expert_bytes` is the size of a row.
  std::optional<PeerRows> rows = std::nullopt;
};

enum class PeerSource { kZeros, kHome, kSlot };

// A byte range of one kind of weights of one slot. `kZeros` fills it with 0.
struct PeerPiece {
  size_t kind;
  size_t to_slot;
  PeerSource source;
  size_t from_rank;
  size_t from_index;  // home expert or slot of the rank
  size_t offset;      // bytes into the expert
  size_t size;        // bytes, at least 1
};

// Pieces received by one rank, in any order, after the tasks `after`.
struct PeerTask {
  size_t to_rank;
  std::vector<PeerPiece> pieces;
  std::vector<size_t> after;  // indices of earlier tasks, ascending
};

// Plan the copies to fill all slots, in an order satisfying all dependencies.
//   wanted: [R, P], expert of each slot, below R * L; -1: an empty slot, which becomes 0.
//   relay: [R, P], source rank of each slot: its first slot with the expert. -1, or the expert's home rank:
//     from home. Ignored for an empty slot.
// Without relays there is one task per rank, of whole experts. With relays an expert is copied in chunks, and a relay
// forwards a chunk as soon as it is received.
// Fails on an expert or a rank out of range, a relay without the expert, or a cycle of relays.
Status PlanPeerTasks(MatrixView<const int32_t> wanted, MatrixView<const int32_t> relay, const PeerWeights& weights,
                     std::vector<PeerTask>* tasks);

// Return a failure naming the first entry of `wanted` that is no expert.
Status CheckWanted(MatrixView<const int32_t> wanted, size_t num_home);

struct PeerReplica {
  size_t rank;
  size_t slot;
};

// Return the replicas of each home expert of `rank`, in the order of gradient accumulation: by rank, then by slot.
// `wanted` must have passed CheckWanted.
std::vector<std::vector<PeerReplica>> ReplicasOf(MatrixView<const int32_t> wanted, size_t num_home, size_t rank);

// Dtypes supported by SumInOrder.
enum class PeerNumber { kBf16, kF16, kF32, kF64 };

size_t BytesOf(PeerNumber number);

// Compute out[i] = 0 + terms[0][i] + terms[1][i] + ..., one term after the other, in float32 (float64 for kF64),
// rounded once at the end, to even. Every pointer addresses `count` numbers.
void SumInOrder(PeerNumber number, const std::vector<const void*>& terms, size_t count, void* out);

}  // namespace moe_lb
