// Common parts of the peer-copy handlers of all platforms: attributes, and operands as shares.
#pragma once

#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ffi/common/handler.h"
#include "ffi/transport/peer_table.h"
#include "ffi/transport/rendezvous.h"

namespace moe_lb {

namespace xf = xla::ffi;

using PeerIntegers = xf::Buffer<xf::S32>;

inline Status AsMatrix(const char* name, const xf::AnyBuffer& buffer, MatrixView<const int32_t>* matrix) {
  const auto dims = buffer.dimensions();
  if (buffer.element_type() != xf::S32 || dims.size() != 2) {
    return Refuse(name, " has ", dims.size(), " dimensions; expected an int32 matrix");
  }
  *matrix = {static_cast<const int32_t*>(buffer.untyped_data()), static_cast<size_t>(dims[0]),
             static_cast<size_t>(dims[1])};
  return Ok();
}

// Attributes of a call site.
struct PeerAttributes {
  int64_t num_participants;  // devices of a group; each stands for R / num_participants ranks
  int64_t num_lanes;         // devices with the same arguments
  int64_t num_home;          // L
  int64_t chunk_bytes;
  double timeout_s;
  std::string site;
  // Process of each participant, one group after the other, if every participant is a process of its own; empty if all
  // are devices of this process.
  std::vector<int64_t> processes;

  RendezvousOptions Options() const {
    return {site, num_participants, num_lanes, std::chrono::duration<double>(timeout_s)};
  }
};

inline auto BindPeerSite() {
  return xf::Ffi::BindInstantiate()
      .Attr<int64_t>("num_participants")
      .Attr<int64_t>("num_lanes")
      .Attr<int64_t>("num_home")
      .Attr<int64_t>("chunk_bytes")
      .Attr<double>("timeout_s")
      .Attr<std::string_view>("site")
      .Attr<xf::Span<const int64_t>>("processes");
}

// Attributes of `copy_rows`.
inline auto BindRowSite() {
  return BindPeerSite()
      .Attr<bool>("back")           // from takers to homes
      .Attr<int64_t>("num_kinds");  // of rows
}

inline Status CheckAttributes(const PeerAttributes& attributes) {
  if (attributes.num_home < 1) return Refuse("num_home is ", attributes.num_home, "; expected at least 1");
  // Experts are int32, and sizes that are multiples of num_home must not overflow.
  if (attributes.num_home > std::numeric_limits<int32_t>::max()) {
    return Refuse("num_home is ", attributes.num_home, "; expected at most ", std::numeric_limits<int32_t>::max());
  }
  if (attributes.chunk_bytes < 1) return Refuse("chunk_bytes is ", attributes.chunk_bytes, "; expected at least 1");
  if (Status bad = CheckOptions(attributes.Options())) return bad;
  if (attributes.processes.size() % static_cast<size_t>(attributes.num_participants) != 0) {
    return Refuse("processes has ", attributes.processes.size(), " entries; expected a multiple of the ",
                  attributes.num_participants, " participants");
  }
  return Ok();
}

// The instantiate stage of a call site: `make` takes checked attributes and those beside them.
template <auto make>
struct Made;

template <typename Site, typename... More, xf::ErrorOr<std::unique_ptr<Site>> (*make)(PeerAttributes, More...)>
struct Made<make> {
  static xf::ErrorOr<std::unique_ptr<Site>> Run(int64_t num_participants, int64_t num_lanes, int64_t num_home,
                                                int64_t chunk_bytes, double timeout_s, std::string_view site,
                                                xf::Span<const int64_t> processes, More... more) {
    PeerAttributes attributes = {num_participants,
                                 num_lanes,
                                 num_home,
                                 chunk_bytes,
                                 timeout_s,
                                 std::string(site),
                                 {processes.begin(), processes.end()}};
    if (Status bad = CheckAttributes(attributes)) return xf::Unexpected(ToError(bad));
    return make(std::move(attributes), more...);
  }
};

// place: [2], the participant and its group.
inline Arrival ArrivalOf(xf::RunId run, int64_t device, const int32_t* place) {
  return {run.run_id, device, place[1], place[0]};
}

// Fills a share with arrays of the home experts and the slots of its ranks, one pair per kind of weights.
class PeerShareBuilder {
 public:
  PeerShareBuilder(const PeerAttributes& attributes, int64_t device) : attributes_(attributes) {
    share_.device = device;
    share_.weights.num_home = static_cast<size_t>(attributes.num_home);
    share_.weights.chunk_bytes = static_cast<size_t>(attributes.chunk_bytes);
  }

  Status Tables(const xf::AnyBuffer& wanted_buffer, const xf::AnyBuffer& relay_buffer) {
    MatrixView<const int32_t> wanted{nullptr, 0, 0}, relay{nullptr, 0, 0};
    if (Status bad = AsMatrix("wanted", wanted_buffer, &wanted)) return bad;
    if (Status bad = AsMatrix("relay", relay_buffer, &relay)) return bad;
    return Tables(wanted, relay);
  }

  Status Tables(MatrixView<const int32_t> wanted, MatrixView<const int32_t> relay) {
    const auto participants = static_cast<size_t>(attributes_.num_participants);
    if (wanted.rows() == 0 || wanted.rows() % participants != 0) {
      return Refuse("wanted has ", wanted.rows(), " ranks; expected a positive multiple of the ", participants,
                    " participants");
    }
    if (relay.rows() != wanted.rows() || relay.columns() != wanted.columns()) {
      return Refuse("relay has shape [", relay.rows(), ", ", relay.columns(), "]; expected the shape of wanted, [",
                    wanted.rows(), ", ", wanted.columns(), "]");
    }
    share_.wanted = wanted;
    share_.relay = relay;
    return Ok();
  }

  // home: [ranks here * L, ...]; slots: [ranks here * P, ...].
  Status Weights(const xf::AnyBuffer& home, const xf::AnyBuffer& slots) {
    const size_t kind = share_.home.size();
    const size_t ranks_here = share_.wanted.rows() / static_cast<size_t>(attributes_.num_participants);
    if (Status bad = CheckRows("home", kind, home, ranks_here * share_.weights.num_home)) return bad;
    if (Status bad = CheckRows("slots", kind, slots, ranks_here * share_.wanted.columns())) return bad;
    const auto of_home = home.dimensions();
    const auto of_slots = slots.dimensions();
    bool equal = of_home.size() == of_slots.size() && home.element_type() == slots.element_type();
    for (size_t i = 1; equal && i < of_home.size(); ++i) equal = of_home[i] == of_slots[i];
    if (!equal) return Refuse("home and slots of kind ", kind, " hold experts of different shapes or dtypes");
    share_.weights.expert_bytes.push_back(home.size_bytes() / static_cast<size_t>(of_home[0]));
    share_.home.push_back(static_cast<std::byte*>(home.untyped_data()));
    share_.slots.push_back(static_cast<std::byte*>(slots.untyped_data()));
    return Ok();
  }

  // Tables of rows; their arrays follow, see PlanRowTasks.
  Status RowTables(const xf::AnyBuffer& home, const xf::AnyBuffer& first, const xf::AnyBuffer& size, bool back) {
    if (Status bad = AsMatrix("home", home, &share_.wanted)) return bad;
    if (Status bad = AsMatrix("first row", first, &share_.first)) return bad;
    if (Status bad = AsMatrix("rows", size, &share_.size)) return bad;
    if (share_.wanted.rows() != static_cast<size_t>(attributes_.num_participants)) {
      return Refuse("rows come with ", share_.wanted.rows(), " ranks on ", attributes_.num_participants,
                    " devices; expected a device for each rank");
    }
    share_.weights.rows = PeerRows{0, 0, back};
    return Ok();
  }

  // read: [A, ...]; written: [B, ...]. A and B are equal for all kinds.
  Status Rows(const xf::AnyBuffer& read, const xf::AnyBuffer& written) {
    const size_t kind = share_.home.size();
    const auto from = read.dimensions(), to = written.dimensions();
    bool fit = from.size() >= 1 && from.size() == to.size() && read.element_type() == written.element_type();
    for (size_t i = 1; fit && i < from.size(); ++i) fit = from[i] == to[i];
    if (!fit) return Refuse("rows of kind ", kind, " and room for them have different shapes or dtypes");
    const PeerRows rows = {static_cast<size_t>(from[0]), static_cast<size_t>(to[0]), share_.weights.rows->back};
    if (kind > 0 && (rows.read != share_.weights.rows->read || rows.written != share_.weights.rows->written)) {
      return Refuse("kind ", kind, " has ", rows.read, " rows and room for ", rows.written, "; expected ",
                    share_.weights.rows->read, " and ", share_.weights.rows->written, " as kind 0 has");
    }
    share_.weights.rows = rows;
    // An array without rows has no bytes.
    const size_t bytes = rows.read > 0 ? read.size_bytes() / rows.read : 0;
    share_.weights.expert_bytes.push_back(bytes);
    share_.home.push_back(static_cast<std::byte*>(read.untyped_data()));
    share_.slots.push_back(static_cast<std::byte*>(written.untyped_data()));
    return Ok();
  }

  PeerShare Take() { return std::move(share_); }

 private:
  static Status CheckRows(const char* name, size_t kind, const xf::AnyBuffer& buffer, size_t rows) {
    const auto dims = buffer.dimensions();
    if (dims.size() >= 1 && static_cast<size_t>(dims[0]) == rows) return Ok();
    return Refuse(name, " of kind ", kind, " has ", dims.size() < 1 ? -1 : dims[0], " experts; expected ", rows);
  }

  const PeerAttributes& attributes_;
  PeerShare share_;
};

inline Status CheckSame(const char* what, size_t got, size_t expected) {
  return got == expected ? Ok() : Refuse("got ", got, " ", what, "; expected ", expected);
}

// Reads the operands of `copy_start`.
inline Status ReadCopy(const xf::AnyBuffer& wanted, const xf::AnyBuffer& relay, const xf::RemainingArgs& home,
                       const xf::RemainingRets& slots, PeerShareBuilder* builder) {
  if (Status bad = builder->Tables(wanted, relay)) return bad;
  if (Status bad = CheckSame("results", slots.size(), home.size())) return bad;
  for (size_t kind = 0; kind < home.size(); ++kind) {
    if (Status bad = builder->Weights(*home.get<xf::AnyBuffer>(kind), **slots.get<xf::AnyBuffer>(kind))) return bad;
  }
  return Ok();
}

// Arrays that `copy_rows` passes through: operand `num_kinds + i` as result `first + i`.
struct PassedRows {
  size_t first = 0;
  size_t count = 0;
};

// args: rows to read of each kind, passed arrays; rets: receive buffers of each kind (which may be passed too), passed
// arrays.
inline Status CheckRowArrays(const xf::RemainingArgs& args, const xf::RemainingRets& rets, size_t num_kinds,
                             PassedRows* passed) {
  const size_t count = args.size() < num_kinds ? 0 : args.size() - num_kinds;
  if (num_kinds < 1 || args.size() < num_kinds || (rets.size() != count && rets.size() != num_kinds + count) ||
      rets.size() < num_kinds) {
    return Refuse("got ", args.size(), " arrays, ", rets.size(), " results and ", num_kinds,
                  " kinds; expected rows of at least 1 kind, room for them among the results, and what is passed on");
  }
  *passed = {rets.size() - count, count};
  for (size_t i = 0; i < count; ++i) {
    const xf::AnyBuffer in = *args.get<xf::AnyBuffer>(num_kinds + i),
                        out = **rets.get<xf::AnyBuffer>(passed->first + i);
    if (in.size_bytes() == out.size_bytes()) continue;
    return Refuse("array ", i, " has ", in.size_bytes(), " bytes and its result has ", out.size_bytes(),
                  "; expected as many");
  }
  return Ok();
}

// Extends `Binding` by the operands and results of `copy_rows`.
template <typename Binding>
auto AndRows(Binding binding) {
  return std::move(binding)
      .template Arg<PeerIntegers>()   // place [2]
      .template Arg<xf::AnyBuffer>()  // home [R, P]
      .template Arg<xf::AnyBuffer>()  // first row [R, P]
      .template Arg<xf::AnyBuffer>()  // rows [R, P]
      .RemainingArgs()                // rows [A, ...] of each kind, passed arrays
      .template Ret<PeerIntegers>()   // ticket [2]
      .RemainingRets();               // receive buffers [B, ...] of each kind, passed arrays
}

inline Status NumberOf(xf::DataType dtype, PeerNumber* number) {
  switch (dtype) {
    case xf::BF16:
      *number = PeerNumber::kBf16;
      return Ok();
    case xf::F16:
      *number = PeerNumber::kF16;
      return Ok();
    case xf::F32:
      *number = PeerNumber::kF32;
      return Ok();
    case xf::F64:
      *number = PeerNumber::kF64;
      return Ok();
    default:
      return Refuse("dtype of gradients is ", static_cast<int>(dtype), "; expected BF16, F16, F32 or F64");
  }
}

// A ticket as two int32, the low half first: JAX without x64 has no int64.
inline void WriteTicket(int64_t ticket, int32_t* out) {
  out[0] = static_cast<int32_t>(ticket & 0xffffffff);
  out[1] = static_cast<int32_t>(ticket >> 32);
}

inline int64_t ReadTicket(const int32_t* in) {
  // The high half is unsigned, because shifting a negative number is undefined.
  const uint64_t high = static_cast<uint32_t>(in[1]);
  return static_cast<int64_t>(high << 32 | static_cast<uint32_t>(in[0]));
}

}  // namespace moe_lb
