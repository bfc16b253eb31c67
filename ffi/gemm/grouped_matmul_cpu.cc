// Grouped products on the compute threads of XLA:CPU.
#include <cstdint>
#include <functional>
#include <sstream>
#include <string>
#include <utility>

#include "ffi/common/handler.h"
#include "ffi/gemm/grouped_matmul.h"
#include "ffi/gemm/handlers.h"

namespace moe_lb {
namespace {

namespace xf = xla::ffi;

using Sizes = xf::Buffer<xf::S32>;
using Result = xf::Result<xf::AnyBuffer>;

// The threads on which XLA computes; a separate pool would contend with them for the same cores. The reference is used
// only while the handler runs.
Pool PoolOf(xf::ThreadPool& threads) {
  return {threads.num_threads(), [&threads](std::function<void()> task) { threads.Schedule(std::move(task)); }};
}

template <typename T>
MatrixView<T> Matrix(const xf::AnyBuffer& buffer, int64_t rows, int64_t columns) {
  return {static_cast<T*>(buffer.untyped_data()), static_cast<size_t>(rows), static_cast<size_t>(columns)};
}

Status CheckShape(const char* name, const xf::AnyBuffer& buffer, xf::DataType dtype,
                  std::initializer_list<int64_t> want) {
  if (buffer.element_type() != dtype) return Refuse(name, " has another dtype than expected");
  const auto have = buffer.dimensions();
  size_t i = 0;
  bool same = have.size() == want.size();
  // Indexing is safe: `same` is false from the start if the number of dimensions differs.
  for (const int64_t dimension : want) same = same && have[i++] == dimension;
  if (same) return Ok();
  std::ostringstream shape;
  for (const int64_t dimension : want) shape << (shape.tellp() ? ", " : "") << dimension;
  return Refuse(name, " has another shape than [", shape.str(), "]");
}

Status CheckDimensions(const char* name, const xf::AnyBuffer& buffer, size_t want) {
  const size_t have = buffer.dimensions().size();
  return have == want ? Ok() : Refuse(name, " has ", have, " dimensions; expected ", want);
}

template <typename T>
Status RunMatmul(xf::ThreadPool& threads, const xf::AnyBuffer& rows, const xf::AnyBuffer& weights, Sizes& sizes,
                 const xf::AnyBuffer& out, bool transposed) {
  const int64_t num_rows = rows.dimensions()[0], depth = rows.dimensions()[1], columns = out.dimensions()[1];
  const View<const T> matrices(static_cast<const T*>(weights.untyped_data()), weights.element_count());
  return GroupedMatmul<T>(Matrix<const T>(rows, num_rows, depth), matrices, transposed, ViewOf(sizes),
                          Matrix<T>(out, num_rows, columns), PoolOf(threads), BestInstructions());
}

// Checks all shapes against those of `rows`, the result and `group_sizes`: the algorithm takes plain pointers and does
// not check sizes.
Status Matmul(xf::ThreadPool& threads, const xf::AnyBuffer& rows, const xf::AnyBuffer& weights, Sizes& sizes,
              const xf::AnyBuffer& out, int64_t transposed) {
  if (Status bad = CheckDimensions("rows", rows, 2)) return bad;
  if (Status bad = CheckDimensions("the result", out, 2)) return bad;
  if (transposed != 0 && transposed != 1) return Refuse("transposed is ", transposed, "; expected 0 or 1");
  const auto num_groups = static_cast<int64_t>(sizes.element_count());
  const int64_t depth = rows.dimensions()[1], columns = out.dimensions()[1];
  const xf::DataType dtype = rows.element_type();
  if (Status bad = CheckShape("the result", out, dtype, {rows.dimensions()[0], columns})) return bad;
  if (Status bad = transposed ? CheckShape("weights", weights, dtype, {num_groups, columns, depth})
                              : CheckShape("weights", weights, dtype, {num_groups, depth, columns})) {
    return bad;
  }
  if (dtype == xf::F32) return RunMatmul<float>(threads, rows, weights, sizes, out, transposed);
  if (dtype == xf::F64) return RunMatmul<double>(threads, rows, weights, sizes, out, transposed);
  if (dtype == xf::BF16) return RunMatmul<Bf16>(threads, rows, weights, sizes, out, transposed);
  return Refuse("rows have an unknown dtype; expected float32, float64 or bfloat16");
}

template <typename T>
Status RunOuter(xf::ThreadPool& threads, const xf::AnyBuffer& rows, const xf::AnyBuffer& others, Sizes& sizes,
                const xf::AnyBuffer& out) {
  const int64_t num_rows = rows.dimensions()[0], width = rows.dimensions()[1], columns = others.dimensions()[1];
  return GroupedOuter<T>(Matrix<const T>(rows, num_rows, width), Matrix<const T>(others, num_rows, columns),
                         ViewOf(sizes), Matrix<SumOf<T>>(out, out.dimensions()[0] * width, columns), PoolOf(threads),
                         BestInstructions());
}

Status Outer(xf::ThreadPool& threads, const xf::AnyBuffer& rows, const xf::AnyBuffer& others, Sizes& sizes,
             const xf::AnyBuffer& before, const xf::AnyBuffer& out) {
  if (Status bad = CheckDimensions("rows", rows, 2)) return bad;
  if (Status bad = CheckDimensions("others", others, 2)) return bad;
  const int64_t num_rows = rows.dimensions()[0], width = rows.dimensions()[1], columns = others.dimensions()[1];
  // Gradients of bfloat16 weights are sums over many rows; they stay float32 here, and the caller rounds once.
  const xf::DataType dtype = rows.element_type(), sums = dtype == xf::BF16 ? xf::F32 : dtype;
  if (Status bad = CheckShape("others", others, dtype, {num_rows, columns})) return bad;
  const auto num_groups = static_cast<int64_t>(sizes.element_count());
  if (Status bad = CheckShape("sums", before, sums, {num_groups, width, columns})) return bad;
  if (Status bad = CheckShape("the result", out, sums, {num_groups, width, columns})) return bad;
  // The sums are aliased to the result; copy them if XLA could not alias them.
  PassOn(before, out);
  if (dtype == xf::F32) return RunOuter<float>(threads, rows, others, sizes, out);
  if (dtype == xf::F64) return RunOuter<double>(threads, rows, others, sizes, out);
  if (dtype == xf::BF16) return RunOuter<Bf16>(threads, rows, others, sizes, out);
  return Refuse("rows have an unknown dtype; expected float32, float64 or bfloat16");
}

// Name the device, because all devices make this call and only one of them may have a bad operand.
xf::Error OnDevice(int32_t device, const Status& status) {
  return status ? ToError(At("device " + std::to_string(device), *status)) : xf::Error::Success();
}

xf::Error HandleMatmul(xf::ThreadPool threads, int32_t device, xf::AnyBuffer rows, xf::AnyBuffer weights, Sizes sizes,
                       Result out, int64_t transposed) {
  return OnDevice(device, Matmul(threads, rows, weights, sizes, *out, transposed));
}

xf::Error HandleOuter(xf::ThreadPool threads, int32_t device, xf::AnyBuffer rows, xf::AnyBuffer others, Sizes sizes,
                      xf::AnyBuffer sums, Result out) {
  return OnDevice(device, Outer(threads, rows, others, sizes, sums, *out));
}

XLA_FFI_DEFINE_HANDLER(kMatmul, HandleMatmul,
                       xf::Ffi::Bind()
                           .Ctx<xf::ThreadPool>()
                           .Ctx<xf::DeviceOrdinal>()
                           .Arg<xf::AnyBuffer>()  // rows [A, K]
                           .Arg<xf::AnyBuffer>()  // weights [G, K, N], or [G, N, K]
                           .Arg<Sizes>()          // group_sizes [G]
                           .Ret<xf::AnyBuffer>()  // [A, N]
                           .Attr<int64_t>("transposed"));

XLA_FFI_DEFINE_HANDLER(kOuter, HandleOuter,
                       xf::Ffi::Bind()
                           .Ctx<xf::ThreadPool>()
                           .Ctx<xf::DeviceOrdinal>()
                           .Arg<xf::AnyBuffer>()    // rows [A, K]
                           .Arg<xf::AnyBuffer>()    // others [A, N]
                           .Arg<Sizes>()            // group_sizes [G]
                           .Arg<xf::AnyBuffer>()    // sums [G, K, N], aliased to the result
                           .Ret<xf::AnyBuffer>());  // [G, K, N]

}  // namespace

Registrations GemmRegistrations() {
  return {{}, {{"moe_lb_grouped_matmul", kMatmul}, {"moe_lb_grouped_outer", kOuter}}};
}

}  // namespace moe_lb
