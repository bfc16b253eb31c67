// Where the devices of a CPU meet to copy weights: what all calls that copy share.
#pragma once

#include <cstdint>
#include <utility>
#include <variant>
#include <vector>

#include "ffi/transport/peer_operands.h"
#include "ffi/transport/peer_tickets.h"

namespace moe_lb::peer_cpu {

// From a call that starts copies to `copy_join`.
using Tickets = PeerTickets<std::monostate>;
Tickets& OpenTickets();

// What a participant brings.
struct Brought {
  PeerShare share;
  std::vector<PeerNumber> numbers;  // only for sums
  std::vector<int32_t> tables;      // what the share's tables show, where XLA has no buffer of it
};

using Meeting = Rendezvous<Brought>;

// What the ranks meet for: the copies that their tables ask for.
void Copy(View<Brought> brought, Meeting::Finish finish);

// One per call site of an executable.
struct Site {
  static xf::TypeId id;
  static xf::TypeInfo info;

  Site(PeerAttributes given, Meeting::Act act)
      : attributes(std::move(given)), meeting(attributes.Options(), std::move(act)) {}

  const PeerAttributes attributes;
  Meeting meeting;
};

xf::Future Failed(const Status& bad);

// Arrives, bad arguments or not, so that nobody waits for this participant. The future completes when all copies of the
// group are done.
xf::Future Arrive(Site* site, const Arrival& who, Brought brought, Status refusal);

}  // namespace moe_lb::peer_cpu
