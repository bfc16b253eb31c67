#include "ffi/transport/peer_tickets.h"

#include <cstddef>

#include "ffi/common/testing.h"

namespace {

using Tickets = moe_lb::PeerTickets<int>;

void ATicketIsGoodOnceAndInItsRunOnly() {
  Tickets tickets;
  const int64_t ticket = tickets.Open(5, 42);
  int note = 0;
  EXPECT(tickets.Close(6, ticket, &note));
  EXPECT(tickets.Close(5, ticket + 1, &note));
  EXPECT(!tickets.Close(5, ticket, &note));
  EXPECT_EQ(note, 42);
  EXPECT_EQ(*tickets.Close(5, ticket, &note),
            "ticket is 1; expected one that start gave in this run of the program and that was not joined yet");
}

void TicketsOfFailedRunsDoNotPileUp() {
  Tickets tickets;
  int64_t last = 0;
  for (int64_t run = 0; run < 3000; ++run) last = tickets.Open(-run, 0);
  EXPECT_EQ(tickets.num_open(), Tickets::kMaxRuns);
  int note = 0;
  EXPECT(!tickets.Close(-2999, last, &note));
  EXPECT(tickets.Close(0, 1, &note));
}

void ANumberOfOnesOwnReplacesTheOldTicket() {
  for (const int64_t number : {0, 99}) {
    Tickets tickets;
    tickets.OpenAs(1, number, 7);
    tickets.OpenAs(1, number, 8);
    EXPECT_EQ(tickets.num_open(), 1u);
    int note = 0;
    EXPECT(!tickets.Close(1, number, &note));
    EXPECT_EQ(note, 8);
  }
}

void TicketsWithoutAnAddressAreClosedInTheirOrder() {
  Tickets tickets;
  tickets.OpenAs(1, -1, 7);
  tickets.OpenAs(1, -1, 8);
  for (const int expected : {7, 8}) {
    int note = 0;
    EXPECT(!tickets.Close(1, -1, &note));
    EXPECT_EQ(note, expected);
  }
}

}  // namespace

int main() {
  TicketsWithoutAnAddressAreClosedInTheirOrder();
  ANumberOfOnesOwnReplacesTheOldTicket();
  ATicketIsGoodOnceAndInItsRunOnly();
  TicketsOfFailedRunsDoNotPileUp();
}
