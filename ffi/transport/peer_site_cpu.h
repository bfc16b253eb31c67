// Call sites of CPU copies: state shared by all handlers copying weights or rows between devices.
#pragma once

#include <cstdint>
#include <utility>
#include <variant>
#include <vector>

#include "ffi/transport/peer_operands.h"
#include "ffi/transport/peer_tickets.h"

namespace moe_lb::peer_cpu {

// Calls between the start of copies and `copy_join`.
using Tickets = PeerTickets<std::monostate>;
Tickets& OpenTickets();

// Arguments of one participant of a call.
struct CallArguments {
  PeerShare share;
  std::vector<PeerNumber> numbers;  // only for sums
  std::vector<int32_t> tables;      // storage of the share's tables, if XLA has no buffer of them
};

using CallRendezvous = Rendezvous<CallArguments>;

// Copies the weights or rows listed by the tables of the ranks.
void Copy(View<CallArguments> arguments, CallRendezvous::Finish finish);

// State of one call site of an executable.
struct Site {
  static xf::TypeId id;
  static xf::TypeInfo info;

  Site(PeerAttributes given, CallRendezvous::Act act)
      : attributes(std::move(given)), rendezvous(attributes.Options(), std::move(act)) {}

  const PeerAttributes attributes;
  CallRendezvous rendezvous;
};

xf::Future Failed(const Status& bad);

// Arrives, also with a refusal, so that the other participants do not wait. The future completes when all copies of the
// group are done.
xf::Future Arrive(Site* site, const Arrival& who, CallArguments arguments, Status refusal);

}  // namespace moe_lb::peer_cpu
