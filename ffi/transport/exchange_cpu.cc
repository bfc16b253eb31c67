// Exact-size exchange of rows between the devices of this process.
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ffi/common/handler.h"
#include "ffi/transport/copier.h"
#include "ffi/transport/exchange.h"
#include "ffi/transport/handlers.h"
#include "ffi/transport/outcome_error.h"
#include "ffi/transport/rendezvous.h"

namespace moe_lb {
namespace {

namespace xf = xla::ffi;

// Below this size, waking other threads takes longer than the copies.
constexpr size_t kInlineBytes = 64 * 1024;

struct Participant {
  ExchangeSide side;
  int64_t device = 0;
};

using ExchangeRendezvous = Rendezvous<Participant>;

// State of one call site.
struct ExchangeState {
  static xf::TypeId id;
  static xf::TypeInfo info;

  explicit ExchangeState(RendezvousOptions options) : rendezvous(std::move(options), Exchange) {}

  static void Exchange(View<Participant> participants, const ExchangeRendezvous::Finish& finish);

  ExchangeRendezvous rendezvous;
};

xf::TypeId ExchangeState::id = {};
xf::TypeInfo ExchangeState::info = xf::MakeTypeInfo<ExchangeState>();

// All sides, and the number of copiers still at work.
struct Work {
  std::vector<ExchangeSide> sides;
  std::atomic<size_t> num_left;
  ExchangeRendezvous::Finish finish;

  View<const ExchangeSide> view() const { return {sides.data(), sides.size()}; }
};

void ExchangeState::Exchange(View<Participant> participants, const ExchangeRendezvous::Finish& finish) {
  const auto work = std::make_shared<Work>();
  for (const Participant& participant : participants) work->sides.push_back(participant.side);
  // Check all sides before the first copy: if one rank is invalid, no output changes.
  if (Status bad = CheckExchange(work->view())) return finish(bad);
  if (ExchangedBytes(work->view()) <= kInlineBytes) {
    for (size_t rank = 0; rank < participants.size(); ++rank) Receive(work->view(), rank);
    return finish(Ok());
  }
  // All copiers before the first job: a failure between jobs would free the buffers of those running.
  std::vector<Copier*> copiers(participants.size());
  for (size_t rank = 0; rank < participants.size(); ++rank) {
    if (Status bad = Copiers::Of(participants[rank].device, &copiers[rank])) return finish(bad);
  }
  // Set before the first job is enqueued, because it may finish before the next one is enqueued.
  work->num_left = participants.size();
  work->finish = finish;
  std::vector<Copier::Jobs> jobs(participants.size());
  for (size_t rank = 0; rank < participants.size(); ++rank) {
    jobs[rank].push_back([work, rank] {
      Receive(work->view(), rank);
      // The decrement also orders memory: the thread reaching 0, and XLA after it, sees the copies of all others.
      if (--work->num_left == 0) work->finish(Ok());
    });
  }
  // Each receiver has its own copier, so only one thread writes to an output.
  for (size_t rank = 0; rank < participants.size(); ++rank) copiers[rank]->Enqueue(std::move(jobs[rank]));
}

xf::ErrorOr<std::unique_ptr<ExchangeState>> Instantiate(int64_t num_ranks, int64_t num_lanes, double timeout_s,
                                                        std::string_view site) {
  RendezvousOptions options{std::string(site), num_ranks, num_lanes, std::chrono::duration<double>(timeout_s)};
  // A bad attribute fails here, before any device runs and waits for another.
  if (Status bad = CheckOptions(options)) return xf::Unexpected(ToError(bad));
  return std::make_unique<ExchangeState>(std::move(options));
}

// Number of rows and bytes per row.
struct RowShape {
  int64_t num_rows = 0;
  size_t row_bytes = 0;
};

RowShape RowShapeOf(const xf::AnyBuffer& buffer) {
  const auto dimensions = buffer.dimensions();
  RowShape shape{dimensions.front(), xf::ByteWidth(buffer.element_type())};
  for (size_t i = 1; i < dimensions.size(); ++i) shape.row_bytes *= static_cast<size_t>(dimensions[i]);
  return shape;
}

// Checks the buffers of one rank; CheckExchange checks them across ranks.
Status CheckBuffers(const xf::AnyBuffer& operand, const xf::AnyBuffer& output, const xf::AnyBuffer& result) {
  const auto num_dimensions = operand.dimensions().size();
  if (num_dimensions == 0) return Refuse("operand has no dimension; expected [P, ...]");
  if (xf::ByteWidth(operand.element_type()) == 0) return Refuse("operand has a type without bytes");
  for (const xf::AnyBuffer& other : {output, result}) {
    if (other.element_type() != operand.element_type() || other.dimensions().size() != num_dimensions ||
        RowShapeOf(other).row_bytes != RowShapeOf(operand).row_bytes) {
      return Refuse("rows of output differ from those of operand; expected the same type and shape");
    }
  }
  if (result.dimensions().front() != output.dimensions().front()) {
    return Refuse("result has ", result.dimensions().front(), " rows; expected the ", output.dimensions().front(),
                  " of output");
  }
  return Ok();
}

xf::Future Execute(ExchangeState* state, xf::RunId run_id, int32_t device, xf::AnyBuffer operand, xf::AnyBuffer output,
                   xf::Buffer<xf::S32> input_offsets, xf::Buffer<xf::S32> send_sizes,
                   xf::Buffer<xf::S32> output_offsets, xf::Buffer<xf::S32> recv_sizes, xf::Buffer<xf::S32> place,
                   xf::Result<xf::AnyBuffer> result) {
  xf::Promise promise;
  xf::Future future(promise);
  const ExchangeRendezvous::Done done = [promise](const Outcome& outcome) mutable {
    if (outcome.failure) {
      promise.SetError(ToError(outcome));
    } else {
      promise.SetAvailable();
    }
  };
  // Without a rank there is no identity to arrive as. The shape belongs to the program, so all devices fail here alike.
  if (place.element_count() != 2) {
    done({Refuse("place has ", place.element_count(), " entries; expected rank and group"), false});
    return future;
  }
  const int32_t rank = place.typed_data()[0], group = place.typed_data()[1];
  Participant participant;
  Status refusal = CheckBuffers(operand, output, *result);
  if (refusal) {
    refusal = At("rank " + std::to_string(rank), *refusal);
  } else {
    const RowShape in = RowShapeOf(operand), out = RowShapeOf(*result);
    // The output is aliased to the result. If XLA could not alias it, copy the output, for the rows that receive no
    // slice. Copy before the arrival: the other ranks write into these rows after it.
    PassOn(output, *result);
    // Views of XLA's buffers. They live until this rank's future completes. All futures complete together after the
    // last copy, so no rank reads freed buffers of another.
    participant = {{static_cast<const std::byte*>(operand.untyped_data()), in.num_rows,
                    static_cast<std::byte*>(result->untyped_data()), out.num_rows, in.row_bytes, ViewOf(input_offsets),
                    ViewOf(send_sizes), ViewOf(output_offsets), ViewOf(recv_sizes)},
                   device};
  }
  state->rendezvous.Arrive({run_id.run_id, device, group, rank}, participant, std::move(refusal), done);
  return future;
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate,
                       xf::Ffi::BindInstantiate()
                           .Attr<int64_t>("num_ranks")
                           .Attr<int64_t>("num_lanes")  // devices arriving as the same rank with the same data
                           .Attr<double>("timeout_s")
                           .Attr<std::string_view>("site"));  // starts every message

XLA_FFI_DEFINE_HANDLER(kExecute, Execute,
                       xf::Ffi::Bind()
                           .Ctx<xf::State<ExchangeState>>()
                           .Ctx<xf::RunId>()
                           .Ctx<xf::DeviceOrdinal>()
                           .Arg<xf::AnyBuffer>()        // operand [P, ...]
                           .Arg<xf::AnyBuffer>()        // output [Q, ...], aliased to the result
                           .Arg<xf::Buffer<xf::S32>>()  // input_offsets [U]
                           .Arg<xf::Buffer<xf::S32>>()  // send_sizes [U]
                           .Arg<xf::Buffer<xf::S32>>()  // output_offsets [U]
                           .Arg<xf::Buffer<xf::S32>>()  // recv_sizes [U]
                           .Arg<xf::Buffer<xf::S32>>()  // rank and group [2]
                           .Ret<xf::AnyBuffer>());      // [Q, ...]

}  // namespace

Registrations ExchangeRegistrations() {
  return {{{"moe_lb_exchange_state", &ExchangeState::id, &ExchangeState::info}},
          {{"moe_lb_ragged_exchange", kExecute, kInstantiate}}};
}

}  // namespace moe_lb
