// Planners as XLA calls, shared by all platforms: the binding and the host function of each.
//
// A new planner adds a function returning its PlannerCall, its binding, and one line in each of handlers_cpu.cc and
// handlers_cuda.cc.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <vector>

#include "ffi/common/status.h"
#include "ffi/common/view.h"
#include "ffi/planning/eplb_plus.h"
#include "ffi/planning/exact_domains.h"
#include "ffi/planning/fastermoe.h"
#include "ffi/planning/feplb.h"
#include "ffi/planning/greedy.h"
#include "ffi/planning/relay.h"
#include "ffi/planning/spray.h"
#include "ffi/planning/ultraep.h"
#include "xla/ffi/api/ffi.h"

namespace moe_lb {

using Vector = xla::ffi::BufferR1<xla::ffi::S32>;
using Matrix = xla::ffi::BufferR2<xla::ffi::S32>;
using VectorResult = xla::ffi::ResultBufferR1<xla::ffi::S32>;
using MatrixResult = xla::ffi::ResultBufferR2<xla::ffi::S32>;

// The last result of every planner: [1], 0 on success or 1 on failure, with the other results undefined. On a CPU a
// failure is an error instead, and the word is always 0; on a GPU the word is the only report.
using StatusResult = VectorResult;

using Operands = std::vector<MatrixView<const int32_t>>;  // a vector is a matrix of one row
using Results = std::vector<MatrixView<int32_t>>;

// One call of a planner. The arrays are in platform memory; `plan` takes host copies of them and captures everything
// else by value, because it may run later.
struct PlannerCall {
  const char* name;
  Operands operands;
  Results results;
  std::function<Status(const Operands&, const Results&)> plan;
};

// Runs a planner; returns its failure, also for exceptions: neither XLA nor CUDA lets one pass.
inline Status Attempt(const PlannerCall& call, const Operands& operands, const Results& results) {
  try {
    return call.plan(operands, results);
  } catch (const std::exception& error) {
    return Refuse(call.name, " failed: ", error.what());
  }
}

inline MatrixView<const int32_t> In(Vector& buffer) { return {buffer.typed_data(), 1, buffer.element_count()}; }

inline MatrixView<const int32_t> In(Matrix& buffer) {
  return {buffer.typed_data(), static_cast<size_t>(buffer.dimensions()[0]),
          static_cast<size_t>(buffer.dimensions()[1])};
}

inline MatrixView<int32_t> Out(VectorResult& buffer) { return {buffer->typed_data(), 1, buffer->element_count()}; }

inline MatrixView<int32_t> Out(MatrixResult& buffer) {
  return {buffer->typed_data(), static_cast<size_t>(buffer->dimensions()[0]),
          static_cast<size_t>(buffer->dimensions()[1])};
}

// ---- Greedy --------------------------------------------------------------------

inline PlannerCall GreedyCall(Matrix placement, Matrix quota, int64_t domain, int64_t min_tokens,
                              MatrixResult new_placement, MatrixResult new_quota) {
  return {
      "moe_lb_plan_greedy",
      {In(placement), In(quota)},
      {Out(new_placement), Out(new_quota)},
      [=](const Operands& in, const Results& out) { return Greedy(in[0], in[1], domain, min_tokens, out[0], out[1]); }};
}

inline auto GreedyBinding() {
  return xla::ffi::Ffi::Bind()
      .Arg<Matrix>()  // placement [R, S]
      .Arg<Matrix>()  // quota [E, R]
      .Attr<int64_t>("domain")
      .Attr<int64_t>("min_tokens")
      .Ret<Matrix>()   // new placement [R, S]
      .Ret<Matrix>()   // new quota [E, R]
      .Ret<Vector>();  // status [1]
}

// ---- UltraEP -------------------------------------------------------------------

inline PlannerCall UltraEpCall(Matrix placement, Matrix quota, int64_t domain, float eps, int64_t min_tokens,
                               MatrixResult new_placement, MatrixResult new_quota) {
  return {"moe_lb_plan_ultraep",
          {In(placement), In(quota)},
          {Out(new_placement), Out(new_quota)},
          [=](const Operands& in, const Results& out) {
            return UltraEp(in[0], in[1], domain, eps, min_tokens, out[0], out[1]);
          }};
}

inline auto UltraEpBinding() {
  return xla::ffi::Ffi::Bind()
      .Arg<Matrix>()  // placement [R, S]
      .Arg<Matrix>()  // quota [E, R]
      .Attr<int64_t>("domain")
      .Attr<float>("eps")
      .Attr<int64_t>("min_tokens")
      .Ret<Matrix>()   // new placement [R, S]
      .Ret<Matrix>()   // new quota [E, R]
      .Ret<Vector>();  // status [1]
}

// ---- Relay ---------------------------------------------------------------------

inline PlannerCall RelayCall(Matrix placement, int64_t num_home, int64_t min_replicas, int64_t max_relays,
                             int64_t min_gain, MatrixResult relay) {
  const RelayOptions options = {min_replicas, max_relays, min_gain};
  return {"moe_lb_plan_relay", {In(placement)}, {Out(relay)}, [=](const Operands& in, const Results& out) {
            return Relay(in[0], num_home, options, out[0]);
          }};
}

inline auto RelayBinding() {
  return xla::ffi::Ffi::Bind()
      .Arg<Matrix>()  // placement [R, S]
      .Attr<int64_t>("num_home")
      .Attr<int64_t>("min_replicas")
      .Attr<int64_t>("max_relays")
      .Attr<int64_t>("min_gain")
      .Ret<Matrix>()   // relay [R, S]
      .Ret<Vector>();  // status [1]
}

// ---- Exact ---------------------------------------------------------------------

inline PlannerCall ExactCall(Matrix counts, int64_t domain, double eps, int64_t max_fan_out, bool localize,
                             MatrixResult placement, MatrixResult quota) {
  ExactDomainsOptions options;
  options.eps = eps;
  options.max_fan_out = max_fan_out;
  options.localize = localize;
  return {"moe_lb_plan_exact", {In(counts)}, {Out(placement), Out(quota)}, [=](const Operands& in, const Results& out) {
            return ExactDomains(in[0], domain, options, out[0], out[1]);
          }};
}

inline auto ExactBinding() {
  return xla::ffi::Ffi::Bind()
      .Arg<Matrix>()  // counts [R, E]
      .Attr<int64_t>("domain")
      .Attr<double>("eps")
      .Attr<int64_t>("max_fan_out")
      .Attr<bool>("localize")
      .Ret<Matrix>()   // placement [R, S]
      .Ret<Matrix>()   // quota [E, R]
      .Ret<Vector>();  // status [1]
}

// ---- FEPLB ---------------------------------------------------------------------

inline PlannerCall FeplbCall(Matrix placement, Matrix quota, int64_t domain, int64_t num_dynamic, int64_t max_num_dyn,
                             int64_t tau, bool skip, MatrixResult new_placement, MatrixResult new_quota) {
  const FeplbOptions options = {domain, num_dynamic, max_num_dyn, tau, skip};
  return {"moe_lb_plan_feplb",
          {In(placement), In(quota)},
          {Out(new_placement), Out(new_quota)},
          [=](const Operands& in, const Results& out) { return Feplb(in[0], in[1], options, out[0], out[1]); }};
}

inline auto FeplbBinding() {
  return xla::ffi::Ffi::Bind()
      .Arg<Matrix>()  // placement [R, S]
      .Arg<Matrix>()  // quota [E, R]
      .Attr<int64_t>("domain")
      .Attr<int64_t>("num_dynamic")
      .Attr<int64_t>("max_num_dyn")
      .Attr<int64_t>("tau")
      .Attr<bool>("skip")
      .Ret<Matrix>()   // new placement [R, S]
      .Ret<Matrix>()   // new quota [E, R]
      .Ret<Vector>();  // status [1]
}

// ---- FasterMoE -----------------------------------------------------------------

inline PlannerCall FasterMoeCall(Matrix placement, Matrix quota, Matrix counts, int64_t domain, int64_t min_saved,
                                 MatrixResult new_placement, MatrixResult new_quota) {
  return {"moe_lb_plan_fastermoe",
          {In(placement), In(quota), In(counts)},
          {Out(new_placement), Out(new_quota)},
          [=](const Operands& in, const Results& out) {
            return FasterMoe(in[0], in[1], in[2], domain, min_saved, out[0], out[1]);
          }};
}

inline auto FasterMoeBinding() {
  return xla::ffi::Ffi::Bind()
      .Arg<Matrix>()  // placement [R, S]
      .Arg<Matrix>()  // quota [E, R]
      .Arg<Matrix>()  // counts [R, E]
      .Attr<int64_t>("domain")
      .Attr<int64_t>("min_saved")
      .Ret<Matrix>()   // new placement [R, S]
      .Ret<Matrix>()   // new quota [E, R]
      .Ret<Vector>();  // status [1]
}

// ---- EPLB+ ---------------------------------------------------------------------

inline PlannerCall EplbPlusCall(Vector tokens, Matrix placement, int64_t domain, MatrixResult new_placement,
                                MatrixResult quota) {
  return {
      "moe_lb_plan_eplb_plus",
      {In(tokens), In(placement)},
      {Out(new_placement), Out(quota)},
      [=](const Operands& in, const Results& out) { return EplbPlus(in[0].flat(), in[1], domain, out[0], out[1]); }};
}

inline auto EplbPlusBinding() {
  return xla::ffi::Ffi::Bind()
      .Arg<Vector>()  // tokens [E]
      .Arg<Matrix>()  // placement [R, S]
      .Attr<int64_t>("domain")
      .Ret<Matrix>()   // new placement [R, S]
      .Ret<Matrix>()   // quota [E, R]
      .Ret<Vector>();  // status [1]
}

// ---- Spray ---------------------------------------------------------------------

inline PlannerCall SprayCall(Matrix rows, Vector ticks, int64_t ranks_per_node, int64_t chunks, MatrixResult rails) {
  return {"moe_lb_plan_spray", {In(rows), In(ticks)}, {Out(rails)}, [=](const Operands& in, const Results& out) {
            return Spray(in[0], in[1].flat(), ranks_per_node, chunks, out[0]);
          }};
}

inline auto SprayBinding() {
  return xla::ffi::Ffi::Bind()
      .Arg<Matrix>()  // rows [R, R]
      .Arg<Vector>()  // ticks [N]
      .Attr<int64_t>("ranks_per_node")
      .Attr<int64_t>("chunks")
      .Ret<Matrix>()   // rails [R, R * N]
      .Ret<Vector>();  // status [1]
}

}  // namespace moe_lb
