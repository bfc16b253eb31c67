#include "ffi/transport/peer_copies.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace moe_lb {
namespace {

// Source of a slot.
struct Origin {
  PeerSource source = PeerSource::kZeros;
  size_t rank = 0;
  size_t index = 0;
  size_t depth = 0;  // relays on the way
};

using Origins = std::vector<std::vector<Origin>>;  // [R][P]

Status FindOrigin(MatrixView<const int32_t> wanted, MatrixView<const int32_t> relay, size_t num_home, size_t rank,
                  size_t slot, Origin* origin) {
  const int32_t expert = wanted[rank][slot];
  if (expert < 0) return Ok();
  const int32_t from = relay[rank][slot];
  if (from < -1 || static_cast<int64_t>(from) >= static_cast<int64_t>(wanted.rows())) {
    return Refuse("relay of rank ", rank, ", slot ", slot, " is ", from, "; expected a rank from 0 to ",
                  wanted.rows() - 1, ", or -1 for the expert's home");
  }
  const size_t home = static_cast<size_t>(expert) / num_home;
  // The home rank as a relay means its home experts, which are in no slot.
  if (from == -1 || static_cast<size_t>(from) == home) {
    *origin = {PeerSource::kHome, home, static_cast<size_t>(expert) % num_home, 0};
    return Ok();
  }
  const View<const int32_t> held = wanted[static_cast<size_t>(from)];
  const auto* found = std::find(held.begin(), held.end(), expert);
  if (found == held.end()) {
    return Refuse("relay of rank ", rank, ", slot ", slot, " is ", from, "; expected a rank holding expert ", expert);
  }
  *origin = {PeerSource::kSlot, static_cast<size_t>(from), static_cast<size_t>(found - held.begin()), 0};
  return Ok();
}

// Counts the relays on the path to each slot.
Status FindDepths(Origins* origins) {
  for (size_t rank = 0; rank < origins->size(); ++rank) {
    for (size_t slot = 0; slot < (*origins)[rank].size(); ++slot) {
      size_t depth = 0;
      for (const Origin* at = &(*origins)[rank][slot]; at->source == PeerSource::kSlot;
           at = &(*origins)[at->rank][at->index]) {
        // All slots of a chain hold the same expert, and a relay is the rank's first slot with it. An acyclic chain
        // visits a rank once, so it has at most as many relays as there are ranks.
        if (++depth > origins->size()) {
          return Refuse("relay of rank ", rank, ", slot ", slot, " is ", (*origins)[rank][slot].rank,
                        "; expected a chain from the expert's home without cycles");
        }
      }
      (*origins)[rank][slot].depth = depth;
    }
  }
  return Ok();
}

size_t MaxDepth(const Origins& origins) {
  size_t depth = 0;
  for (const auto& slots : origins) {
    for (const Origin& origin : slots) depth = std::max(depth, origin.depth);
  }
  return depth;
}

// Tasks of all steps. In step s a slot behind d relays receives its chunk s - d: a relay has every chunk one step
// before it forwards it. So a task waits only for tasks of the previous step, and a relay receives the next chunk while
// it forwards one.
class Pipeline {
 public:
  Pipeline(const Origins& origins, const PeerWeights& weights, std::vector<PeerTask>* tasks)
      : origins_(origins), weights_(weights), tasks_(tasks), max_depth_(MaxDepth(origins)) {}

  void Plan() {
    size_t num_chunks = 1;
    for (size_t kind = 0; kind < weights_.expert_bytes.size(); ++kind) {
      num_chunks = std::max(num_chunks, (weights_.expert_bytes[kind] + ChunkOf(kind) - 1) / ChunkOf(kind));
    }
    before_.assign(origins_.size(), kNone);
    for (size_t step = 0; step < num_chunks + max_depth_; ++step) {
      std::vector<size_t> now(origins_.size(), kNone);
      for (size_t rank = 0; rank < origins_.size(); ++rank) now[rank] = PlanTask(rank, step);
      before_ = now;
    }
  }

 private:
  static constexpr size_t kNone = static_cast<size_t>(-1);

  // Without relays, whole experts make the fewest copies. The size is at least 1 because weights may be empty, and the
  // number of chunks is a quotient.
  size_t ChunkOf(size_t kind) const {
    return std::max<size_t>(max_depth_ == 0 ? weights_.expert_bytes[kind] : weights_.chunk_bytes, 1);
  }

  size_t PlanTask(size_t rank, size_t step) {
    PeerTask task{rank, {}, {}};
    for (size_t slot = 0; slot < origins_[rank].size(); ++slot) {
      const Origin& origin = origins_[rank][slot];
      if (step < origin.depth) continue;
      const size_t num_before = task.pieces.size();
      AddPieces(slot, origin, step - origin.depth, &task);
      if (origin.source == PeerSource::kSlot && task.pieces.size() > num_before) {
        // That task exists: one step earlier its rank received this chunk of this expert.
        task.after.push_back(before_[origin.rank]);
      }
    }
    if (task.pieces.empty()) return kNone;
    std::sort(task.after.begin(), task.after.end());
    task.after.erase(std::unique(task.after.begin(), task.after.end()), task.after.end());
    tasks_->push_back(std::move(task));
    return tasks_->size() - 1;
  }

  void AddPieces(size_t slot, const Origin& origin, size_t chunk, PeerTask* task) const {
    for (size_t kind = 0; kind < weights_.expert_bytes.size(); ++kind) {
      const size_t bytes = weights_.expert_bytes[kind];
      const size_t offset = chunk * ChunkOf(kind);
      if (offset >= bytes) continue;
      const size_t size = std::min(ChunkOf(kind), bytes - offset);
      task->pieces.push_back({kind, slot, origin.source, origin.rank, origin.index, offset, size});
    }
  }

  const Origins& origins_;
  const PeerWeights& weights_;
  std::vector<PeerTask>* tasks_;
  const size_t max_depth_;
  std::vector<size_t> before_;  // the task of each rank in the step before
};

uint32_t BitsOf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

float FloatOf(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

struct Bf16 {
  using Stored = uint16_t;
  using Wide = float;
  static Wide Widen(Stored value) { return FloatOf(static_cast<uint32_t>(value) << 16); }
  static Stored Round(Wide value) {
    const uint32_t bits = BitsOf(value);
    // Rounding could turn a NaN into infinity or 0, and truncation into infinity, if its payload is in the lower half
    // only. So set a payload bit.
    if (std::isnan(value)) return static_cast<Stored>((bits >> 16) | 0x40u);  // quiet
    // Add half of the last bit, less one if this bit is even: ties go to even, as in XLA.
    return static_cast<Stored>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
};

struct F16 {
  using Stored = uint16_t;
  using Wide = float;
  static Wide Widen(Stored value) {
    const uint32_t sign = (value & 0x8000u) << 16;
    const uint32_t magnitude = value & 0x7fffu;
    if (magnitude >= 0x7c00u) return FloatOf(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    const float scaled = FloatOf(magnitude << 13) * 0x1p112f;  // moves the exponent's bias, subnormals too
    return FloatOf(sign | BitsOf(scaled));
  }
  static Stored Round(Wide value) {
    const uint32_t sign = (BitsOf(value) >> 16) & 0x8000u;
    const float magnitude = std::fabs(value);
    if (std::isnan(value)) return static_cast<Stored>(sign | 0x7e00u);
    // From here on, the nearest float16 (ties to even) would be 65536, which overflows to infinity.
    if (magnitude >= 65520.0f) return static_cast<Stored>(sign | 0x7c00u);
    if (magnitude < 0x1p-14f) {  // subnormal: the sum's last bit is worth 2^-24, so the addition rounds
      return static_cast<Stored>(sign | (BitsOf(magnitude + 0.5f) - BitsOf(0.5f)));
    }
    const uint32_t bits = BitsOf(magnitude) - (112u << 23);
    return static_cast<Stored>(sign | ((bits + 0xfffu + ((bits >> 13) & 1u)) >> 13));
  }
};

template <typename T>
struct Same {
  using Stored = T;
  using Wide = T;
  static T Widen(T value) { return value; }
  static T Round(T value) { return value; }
};

template <typename Number>
void Sum(const std::vector<const void*>& terms, size_t count, void* out) {
  // A block of sums stays in the cache while all terms pass. Terms are added in order, so that gradients are bitwise
  // reproducible, independent of timing and of the relays.
  constexpr size_t kBlock = 2048;
  typename Number::Wide sums[kBlock];
  for (size_t start = 0; start < count; start += kBlock) {
    const size_t size = std::min(kBlock, count - start);
    std::fill_n(sums, size, typename Number::Wide(0));
    for (const void* term : terms) {
      const auto* values = static_cast<const typename Number::Stored*>(term) + start;
      for (size_t i = 0; i < size; ++i) sums[i] += Number::Widen(values[i]);
    }
    auto* to = static_cast<typename Number::Stored*>(out) + start;
    for (size_t i = 0; i < size; ++i) to[i] = Number::Round(sums[i]);
  }
}

}  // namespace

Status CheckWanted(MatrixView<const int32_t> wanted, size_t num_home) {
  // The product fits: there are fewer than 2^31 home experts (CheckAttributes), and the rows belong to a table in
  // memory.
  const auto num_experts = static_cast<int64_t>(wanted.rows() * num_home);
  for (size_t rank = 0; rank < wanted.rows(); ++rank) {
    for (size_t slot = 0; slot < wanted.columns(); ++slot) {
      const int32_t expert = wanted[rank][slot];
      if (expert < -1 || expert >= num_experts) {
        return Refuse("wanted of rank ", rank, ", slot ", slot, " is ", expert, "; expected an expert below ",
                      num_experts, ", or -1 for an empty slot");
      }
    }
  }
  return Ok();
}

Status PlanPeerTasks(MatrixView<const int32_t> wanted, MatrixView<const int32_t> relay, const PeerWeights& weights,
                     std::vector<PeerTask>* tasks) {
  tasks->clear();
  if (weights.chunk_bytes < 1) return Refuse("chunk_bytes is 0; expected at least 1");
  if (relay.rows() != wanted.rows() || relay.columns() != wanted.columns()) {
    return Refuse("relay has shape [", relay.rows(), ", ", relay.columns(), "]; expected the shape of wanted, [",
                  wanted.rows(), ", ", wanted.columns(), "]");
  }
  if (Status bad = CheckWanted(wanted, weights.num_home)) return bad;
  Origins origins(wanted.rows(), std::vector<Origin>(wanted.columns()));
  for (size_t rank = 0; rank < wanted.rows(); ++rank) {
    for (size_t slot = 0; slot < wanted.columns(); ++slot) {
      if (Status bad = FindOrigin(wanted, relay, weights.num_home, rank, slot, &origins[rank][slot])) return bad;
    }
  }
  // Depths require all origins, because a chain leads through the slots of other ranks.
  if (Status bad = FindDepths(&origins)) return bad;
  Pipeline(origins, weights, tasks).Plan();
  return Ok();
}

std::vector<std::vector<PeerReplica>> ReplicasOf(MatrixView<const int32_t> wanted, size_t num_home, size_t rank) {
  std::vector<std::vector<PeerReplica>> replicas(num_home);
  for (size_t holder = 0; holder < wanted.rows(); ++holder) {
    for (size_t slot = 0; slot < wanted.columns(); ++slot) {
      const int32_t expert = wanted[holder][slot];
      if (expert < 0 || static_cast<size_t>(expert) / num_home != rank) continue;
      replicas[static_cast<size_t>(expert) % num_home].push_back({holder, slot});
    }
  }
  return replicas;
}

size_t BytesOf(PeerNumber number) {
  switch (number) {
    case PeerNumber::kBf16:
    case PeerNumber::kF16:
      return 2;
    case PeerNumber::kF32:
      return 4;
    case PeerNumber::kF64:
      return 8;
  }
  return 0;
}

void SumInOrder(PeerNumber number, const std::vector<const void*>& terms, size_t count, void* out) {
  switch (number) {
    case PeerNumber::kBf16:
      return Sum<Bf16>(terms, count, out);
    case PeerNumber::kF16:
      return Sum<F16>(terms, count, out);
    case PeerNumber::kF32:
      return Sum<Same<float>>(terms, count, out);
    case PeerNumber::kF64:
      return Sum<Same<double>>(terms, count, out);
  }
}

}  // namespace moe_lb
