// jax_moe_lb._planning: the planners on NumPy arrays, for the command line and the simulator.
//
// Arrays may have leading dimensions (layers); every planner runs once per entry of them.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <stdexcept>

#include "ffi/planning/lpt.h"

namespace py = pybind11;

namespace {

using Int32Array = py::array_t<int32_t, py::array::c_style>;

void ThrowIf(const moe_lb::Status& bad) {
  if (bad) throw std::invalid_argument(*bad);
}

Int32Array Lpt(const Int32Array& weights, int64_t num_bins, int64_t capacity) {
  if (weights.ndim() < 1) throw std::invalid_argument("weights has no dimension; expected [..., N]");
  Int32Array bins(std::vector<py::ssize_t>(weights.shape(), weights.shape() + weights.ndim()));
  const auto items = static_cast<size_t>(weights.shape(weights.ndim() - 1));
  const size_t layers = items == 0 ? 0 : static_cast<size_t>(weights.size()) / items;
  for (size_t layer = 0; layer < layers; ++layer) {
    const moe_lb::View<const int32_t> in(weights.data() + layer * items, items);
    ThrowIf(moe_lb::Lpt(in, num_bins, capacity, {bins.mutable_data() + layer * items, items}));
  }
  return bins;
}

}  // namespace

PYBIND11_MODULE(_planning, module) {
  module.doc() = "Planners on NumPy arrays; leading dimensions are layers";
  module.def("lpt", &Lpt, py::arg("weights").noconvert(), py::arg("num_bins"), py::arg("capacity"),
             "Bins [..., N] of items of the given weights [..., N]; see jax_moe_lb.ops.lpt");
}
