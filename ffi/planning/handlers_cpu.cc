// Planners computed in the handler: on a CPU the counts are at hand.
#include "ffi/common/handler.h"
#include "ffi/planning/handlers.h"
#include "ffi/planning/lpt.h"

namespace moe_lb {
namespace {

namespace xf = xla::ffi;

xf::Error LptHandler(xf::Buffer<xf::S32> weights, int64_t num_bins, int64_t capacity, xf::ResultBuffer<xf::S32> bins) {
  return ToError(Lpt(ViewOf(weights), num_bins, capacity, ViewOf(bins)));
}

XLA_FFI_DEFINE_HANDLER(kLpt, LptHandler,
                       xf::Ffi::Bind()
                           .Arg<xf::Buffer<xf::S32>>()  // weights [N]
                           .Attr<int64_t>("num_bins")
                           .Attr<int64_t>("capacity")
                           .Ret<xf::Buffer<xf::S32>>());  // bins [N]

}  // namespace

Registrations PlanningRegistrations() { return {{}, {{"moe_lb_plan_lpt", kLpt}}}; }

}  // namespace moe_lb
