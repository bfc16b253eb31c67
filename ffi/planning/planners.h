// Planners as XLA calls, shared by all platforms: the arguments and the host function of each.
//
// A new planner adds a function returning its PlannerCall and one line in each of handlers_cpu.cc and handlers_cuda.cc.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "ffi/common/fields.h"
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

template <typename T>
size_t NumWords(const std::vector<MatrixView<T>>& arrays) {
  size_t words = 0;
  for (const auto& array : arrays) words += array.flat().size();
  return words;
}

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
    return Problem(std::string(call.name) + " failed: " + error.what(), true);
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

// ---- Options -------------------------------------------------------------------

// Reads all fields of options; fails if one is missing or of another type, or if there are others.
template <typename Options>
Status ReadOptions(const xla::ffi::Dictionary& attributes, Options* options) {
  constexpr size_t kFields = std::tuple_size_v<decltype(Options::Fields())>;
  if (attributes.size() != kFields) return Refuse("expected ", kFields, " attributes, got ", attributes.size());
  return ForFields(*options, [&](const char* name, auto& value) -> Status {
    const auto found = attributes.get<std::decay_t<decltype(value)>>(name);
    if (!found.has_value()) return Refuse("found no attribute ", name, " of the expected type");
    value = *found;
    return Ok();
  });
}

// Options read from all attributes of a call.
template <typename Options>
struct FromAttributes : Options {};

// ---- Planners ------------------------------------------------------------------

// placement [R, S], quota [E, R]; the same of the new plan.
inline PlannerCall GreedyCall(Matrix placement, Matrix quota, FromAttributes<GreedyOptions> options,
                              MatrixResult new_placement, MatrixResult new_quota) {
  return {"moe_lb_plan_greedy",
          {In(placement), In(quota)},
          {Out(new_placement), Out(new_quota)},
          [=](const Operands& in, const Results& out) { return Greedy(in[0], in[1], options, out[0], out[1]); }};
}

// placement [R, S], quota [E, R]; the same of the new plan.
inline PlannerCall UltraEpCall(Matrix placement, Matrix quota, FromAttributes<UltraEpOptions> options,
                               MatrixResult new_placement, MatrixResult new_quota) {
  return {"moe_lb_plan_ultraep",
          {In(placement), In(quota)},
          {Out(new_placement), Out(new_quota)},
          [=](const Operands& in, const Results& out) { return UltraEp(in[0], in[1], options, out[0], out[1]); }};
}

// placement [R, S]; relay [R, S].
inline PlannerCall RelayCall(Matrix placement, FromAttributes<RelayOptions> options, MatrixResult relay) {
  return {"moe_lb_plan_relay", {In(placement)}, {Out(relay)}, [=](const Operands& in, const Results& out) {
            return Relay(in[0], options, out[0]);
          }};
}

// counts [R, E]; placement [R, S], quota [E, R].
inline PlannerCall ExactCall(Matrix counts, FromAttributes<ExactDomainsOptions> options, MatrixResult placement,
                             MatrixResult quota) {
  return {"moe_lb_plan_exact", {In(counts)}, {Out(placement), Out(quota)}, [=](const Operands& in, const Results& out) {
            return ExactDomains(in[0], options, out[0], out[1]);
          }};
}

// placement [R, S], quota [E, R]; the same of the new plan.
inline PlannerCall FeplbCall(Matrix placement, Matrix quota, FromAttributes<FeplbOptions> options,
                             MatrixResult new_placement, MatrixResult new_quota) {
  return {"moe_lb_plan_feplb",
          {In(placement), In(quota)},
          {Out(new_placement), Out(new_quota)},
          [=](const Operands& in, const Results& out) { return Feplb(in[0], in[1], options, out[0], out[1]); }};
}

// placement [R, S], quota [E, R], counts [R, E]; placement and quota of the new plan.
inline PlannerCall FasterMoeCall(Matrix placement, Matrix quota, Matrix counts,
                                 FromAttributes<FasterMoeOptions> options, MatrixResult new_placement,
                                 MatrixResult new_quota) {
  return {
      "moe_lb_plan_fastermoe",
      {In(placement), In(quota), In(counts)},
      {Out(new_placement), Out(new_quota)},
      [=](const Operands& in, const Results& out) { return FasterMoe(in[0], in[1], in[2], options, out[0], out[1]); }};
}

// tokens [E], placement [R, S]; new placement [R, S], quota [E, R].
inline PlannerCall EplbPlusCall(Vector tokens, Matrix placement, FromAttributes<EplbPlusOptions> options,
                                MatrixResult new_placement, MatrixResult quota) {
  return {
      "moe_lb_plan_eplb_plus",
      {In(tokens), In(placement)},
      {Out(new_placement), Out(quota)},
      [=](const Operands& in, const Results& out) { return EplbPlus(in[0].flat(), in[1], options, out[0], out[1]); }};
}

// rows [R, R], ticks [N]; rails [R, R * N].
inline PlannerCall SprayCall(Matrix rows, Vector ticks, FromAttributes<SprayOptions> options, MatrixResult rails) {
  return {"moe_lb_plan_spray", {In(rows), In(ticks)}, {Out(rails)}, [=](const Operands& in, const Results& out) {
            return Spray(in[0], in[1].flat(), options, out[0]);
          }};
}

// ---- Bindings ------------------------------------------------------------------

template <typename Binding>
auto Bound(Binding binding) {
  return std::move(binding).template Ret<Vector>();  // status [1]
}

template <typename First, typename... Rest, typename Binding>
auto Bound(Binding binding) {
  if constexpr (std::is_same_v<First, Vector> || std::is_same_v<First, Matrix>) {
    return Bound<Rest...>(std::move(binding).template Arg<First>());
  } else if constexpr (std::is_same_v<First, MatrixResult>) {
    return Bound<Rest...>(std::move(binding).template Ret<Matrix>());
  } else {
    return Bound<Rest...>(std::move(binding).template Attrs<First>());
  }
}

// The binding of a planner: the arguments of the call, then the status word.
template <typename... Args>
auto BindingOf(PlannerCall (*)(Args...)) {
  return Bound<Args...>(xla::ffi::Ffi::Bind());
}

}  // namespace moe_lb

namespace xla::ffi {

template <typename Options>
struct AttrDecoding<moe_lb::FromAttributes<Options>> {
  using Type = moe_lb::FromAttributes<Options>;
  static std::optional<Type> Decode(XLA_FFI_AttrType, void* attributes, DiagnosticEngine& diagnostic) {
    Type options;
    const Dictionary dictionary(static_cast<const XLA_FFI_Attrs*>(attributes));
    if (const moe_lb::Status bad = moe_lb::ReadOptions<Options>(dictionary, &options)) return diagnostic.Emit(*bad);
    return options;
  }
};

}  // namespace xla::ffi
