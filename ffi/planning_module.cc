// jax_moe_lb._planning: the planners on NumPy arrays, for the command line and the simulator.
//
// Arrays may have leading dimensions (layers), which broadcast as in NumPy; a planner runs once per layer. Does not
// depend on JAX. Arrays must be int32: a silent conversion could overflow.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <functional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "ffi/common/fields.h"
#include "ffi/planning/device/on_fibers.h"
#include "ffi/planning/eplb_plus.h"
#include "ffi/planning/exact_domains.h"
#include "ffi/planning/fastermoe.h"
#include "ffi/planning/feplb.h"
#include "ffi/planning/greedy.h"
#include "ffi/planning/relay.h"
#include "ffi/planning/spray.h"
#include "ffi/planning/ultraep.h"

namespace py = pybind11;

namespace {

using Int32Array = py::array_t<int32_t, py::array::c_style>;
using Shape = std::vector<py::ssize_t>;

std::string Text(const Shape& shape) {
  std::string text = "[";
  for (const py::ssize_t size : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

// An argument: one array per layer, whose last dimensions are the planner's operand.
class Operand {
 public:
  Operand(const char* name, const py::array& array, const char* last) {
    if (!py::isinstance<py::array_t<int32_t>>(array)) {
      throw py::type_error(std::string(name) + " has dtype " + py::str(array.dtype()).cast<std::string>() +
                           "; expected int32");
    }
    const py::ssize_t num_last = std::count(last, last + std::char_traits<char>::length(last), ',') + 1;
    const Shape shape(array.shape(), array.shape() + array.ndim());
    if (array.ndim() < num_last) {
      throw std::invalid_argument(std::string(name) + " has shape " + Text(shape) + "; expected [..., " + last + "]");
    }
    layers_.assign(shape.begin(), shape.end() - num_last);
    last_.assign(shape.end() - num_last, shape.end());
    // Planners read contiguous rows: arrays of another layout are copied, all others are used in place.
    array_ = Int32Array::ensure(array);
    if (!array_) throw py::error_already_set();
    for (const py::ssize_t size : last_) size_ *= static_cast<size_t>(size);
  }

  const Shape& layers() const { return layers_; }
  size_t last(size_t i) const { return static_cast<size_t>(last_[i]); }

  // Returns the array of a layer of the broadcast shape of all operands.
  const int32_t* Layer(size_t layer, const Shape& broadcast) const {
    size_t offset = 0;
    size_t stride = 1;
    for (size_t back = 1; back <= layers_.size(); ++back) {
      const auto of_all = static_cast<size_t>(broadcast[broadcast.size() - back]);
      const auto own = static_cast<size_t>(layers_[layers_.size() - back]);
      // Along a dimension of size 1, all layers read the same entry, as in NumPy broadcasting.
      if (own > 1) offset += layer % of_all * stride;
      layer /= of_all;
      stride *= own;
    }
    return array_.data() + offset * size_;
  }

 private:
  Int32Array array_;
  Shape layers_;
  Shape last_;
  size_t size_ = 1;  // entries of a layer
};

Shape Broadcast(const std::vector<const Operand*>& operands) {
  Shape all;
  for (const Operand* operand : operands) {
    const Shape& layers = operand->layers();
    if (layers.size() > all.size()) all.insert(all.begin(), layers.size() - all.size(), 1);
    for (size_t back = 1; back <= layers.size(); ++back) {
      py::ssize_t& size = all[all.size() - back];
      const py::ssize_t own = layers[layers.size() - back];
      if (size != own && size != 1 && own != 1) {
        throw std::invalid_argument("leading dimensions " + Text(operands[0]->layers()) + " and " + Text(layers) +
                                    " do not broadcast");
      }
      if (size == 1) size = own;
    }
  }
  return all;
}

// A result of the given last dimensions for every layer.
Int32Array Result(Shape layers, std::initializer_list<size_t> last) {
  for (const size_t size : last) layers.push_back(static_cast<py::ssize_t>(size));
  return Int32Array(layers);
}

std::string LayerName(size_t layer, const Shape& layers) {
  // A single plan has no layer number for the error.
  if (layers.empty()) return "";
  Shape index(layers.size());
  for (size_t i = layers.size(); i-- > 0; layer /= static_cast<size_t>(layers[i])) {
    index[i] = static_cast<py::ssize_t>(layer % static_cast<size_t>(layers[i]));
  }
  return "layer " + (index.size() == 1 ? std::to_string(index[0]) : Text(index)) + ": ";
}

// Plans every layer without Python's lock, so that threads can plan concurrently. Do not access Python objects here;
// the operands keep their arrays alive. An exception reacquires the lock.
void ForLayers(const Shape& layers, const std::function<moe_lb::Status(size_t)>& plan) {
  size_t num_layers = 1;
  for (const py::ssize_t size : layers) num_layers *= static_cast<size_t>(size);
  const py::gil_scoped_release unlocked;
  for (size_t layer = 0; layer < num_layers; ++layer) {
    if (const moe_lb::Status bad = plan(layer)) throw std::invalid_argument(LayerName(layer, layers) + *bad);
  }
}

using In = moe_lb::MatrixView<const int32_t>;
using Out = moe_lb::MatrixView<int32_t>;

// Makes new plans: plan(layer, placement, quota) writes the plan of a layer.
py::tuple Plans(const Shape& layers, size_t ranks, size_t slots, size_t experts,
                const std::function<moe_lb::Status(size_t, Out, Out)>& plan) {
  // Allocate the results here, with Python's lock; planners only write into their memory.
  Int32Array placement = Result(layers, {ranks, slots});
  Int32Array quota = Result(layers, {experts, ranks});
  int32_t* placed = placement.mutable_data();
  int32_t* served = quota.mutable_data();
  ForLayers(layers, [&](size_t layer) {
    return plan(layer, Out(placed + layer * ranks * slots, ranks, slots),
                Out(served + layer * experts * ranks, experts, ranks));
  });
  return py::make_tuple(placement, quota);
}

// Edits plans: plan(placement, quota, new placement, new quota) of a layer.
template <typename Planner>
py::tuple Edit(const py::array& placement_array, const py::array& quota_array, const Planner& plan) {
  const Operand placement("placement", placement_array, "R, S");
  const Operand quota("quota", quota_array, "E, R");
  const Shape layers = Broadcast({&placement, &quota});
  const size_t ranks = placement.last(0), slots = placement.last(1), experts = quota.last(0);
  return Plans(layers, ranks, slots, experts, [&](size_t layer, Out new_placement, Out new_quota) {
    return plan(In(placement.Layer(layer, layers), ranks, slots),
                In(quota.Layer(layer, layers), experts, quota.last(1)), new_placement, new_quota);
  });
}

// A planner that edits plans.
template <auto planner, typename Options>
py::tuple EditWith(const Options& options, const py::array& placement_array, const py::array& quota_array) {
  return Edit(placement_array, quota_array, [&](auto placement, auto quota, auto new_placement, auto new_quota) {
    return planner(placement, quota, options, new_placement, new_quota);
  });
}

py::tuple FasterMoe(const moe_lb::FasterMoeOptions& options, const py::array& placement_array,
                    const py::array& quota_array, const py::array& counts_array) {
  const Operand placement("placement", placement_array, "R, S");
  const Operand quota("quota", quota_array, "E, R");
  const Operand counts("counts", counts_array, "R, E");
  const Shape layers = Broadcast({&placement, &quota, &counts});
  const size_t ranks = placement.last(0), slots = placement.last(1), experts = quota.last(0);
  return Plans(layers, ranks, slots, experts, [&](size_t layer, Out new_placement, Out new_quota) {
    return moe_lb::FasterMoe(
        In(placement.Layer(layer, layers), ranks, slots), In(quota.Layer(layer, layers), experts, quota.last(1)),
        In(counts.Layer(layer, layers), counts.last(0), counts.last(1)), options, new_placement, new_quota);
  });
}

py::tuple EplbPlus(const moe_lb::EplbPlusOptions& options, const py::array& tokens_array,
                   const py::array& placement_array) {
  const Operand tokens("tokens", tokens_array, "E");
  const Operand placement("placement", placement_array, "R, S");
  const Shape layers = Broadcast({&tokens, &placement});
  const size_t experts = tokens.last(0), ranks = placement.last(0), slots = placement.last(1);
  return Plans(layers, ranks, slots, experts, [&](size_t layer, Out new_placement, Out quota) {
    return moe_lb::EplbPlus({tokens.Layer(layer, layers), experts}, In(placement.Layer(layer, layers), ranks, slots),
                            options, new_placement, quota);
  });
}

// plan(placement, relay) of a layer.
template <typename Planner>
Int32Array Relays(const py::array& placement_array, const Planner& plan) {
  const Operand placement("placement", placement_array, "R, S");
  const Shape layers = placement.layers();
  const size_t ranks = placement.last(0), slots = placement.last(1);
  Int32Array relay = Result(layers, {ranks, slots});
  int32_t* out = relay.mutable_data();
  ForLayers(layers, [&](size_t layer) {
    return plan(In(placement.Layer(layer, layers), ranks, slots), Out(out + layer * ranks * slots, ranks, slots));
  });
  return relay;
}

Int32Array Relay(const moe_lb::RelayOptions& options, const py::array& placement_array) {
  return Relays(placement_array, [&](In placement, Out relay) { return moe_lb::Relay(placement, options, relay); });
}

// plan(counts, placement, quota) of a layer.
template <typename Planner>
py::tuple FromCounts(const py::array& counts_array, size_t num_slots, const Planner& plan) {
  const Operand counts("counts", counts_array, "R, E");
  const Shape layers = counts.layers();
  const size_t ranks = counts.last(0), experts = counts.last(1);
  return Plans(layers, ranks, num_slots, experts, [&](size_t layer, Out placement, Out quota) {
    return plan(In(counts.Layer(layer, layers), ranks, experts), placement, quota);
  });
}

py::tuple Exact(const moe_lb::ExactDomainsOptions& options, const py::array& counts, size_t num_slots) {
  return FromCounts(counts, num_slots, [&](In in, Out placement, Out quota) {
    return moe_lb::ExactDomains(in, options, placement, quota);
  });
}

// ---- Kernels of GPUs, run by fibers --------------------------------------------------

// Estimated paths, one per layer: cycles without and with overlap, barriers, operations of a warp, loads.
class Paths {
 public:
  // Runs plan(&time) for a layer, in the order of layers.
  template <typename Plan>
  moe_lb::Status Add(const Plan& plan) {
    moe_lb::device::BlockTime time;
    auto bad = plan(&time);
    times_.push_back({time.cycles, time.overlapped, time.block_barriers, time.warp_operations, time.shared_loads});
    return bad;
  }

  py::list AsPython() const {
    py::list paths;
    for (const auto& [cycles, overlapped, barriers, operations, loads] : times_) {
      paths.append(py::make_tuple(cycles, overlapped, barriers, operations, loads));
    }
    return paths;
  }

 private:
  std::vector<std::array<int64_t, 5>> times_;
};

py::tuple ExactKernel(const moe_lb::ExactDomainsOptions& options, const py::array& counts, size_t num_slots) {
  Paths paths;
  const py::tuple plans = FromCounts(counts, num_slots, [&](In in, Out placement, Out quota) {
    return paths.Add([&](auto* time) { return moe_lb::device::ExactOnFibers(in, options, placement, quota, time); });
  });
  return py::make_tuple(plans[0], plans[1], paths.AsPython());
}

py::tuple UltraEpKernel(const moe_lb::UltraEpOptions& options, const py::array& placement_array,
                        const py::array& quota_array) {
  Paths paths;
  const py::tuple plans = Edit(placement_array, quota_array, [&](auto placement, auto quota, auto to, auto amounts) {
    return paths.Add(
        [&](auto* time) { return moe_lb::device::UltraEpOnFibers(placement, quota, options, to, amounts, time); });
  });
  return py::make_tuple(plans[0], plans[1], paths.AsPython());
}

py::tuple RelayKernel(const moe_lb::RelayOptions& options, const py::array& placement_array) {
  Paths paths;
  const Int32Array relay = Relays(placement_array, [&](In placement, Out out) {
    return paths.Add([&](auto* time) { return moe_lb::device::RelayOnFibers(placement, options, out, time); });
  });
  return py::make_tuple(relay, paths.AsPython());
}

Int32Array Spray(const moe_lb::SprayOptions& options, const py::array& rows_array, const py::array& ticks_array) {
  const Operand rows("rows", rows_array, "R, R");
  const Operand ticks("ticks", ticks_array, "N");
  const Shape layers = Broadcast({&rows, &ticks});
  const size_t ranks = rows.last(0), columns = rows.last(1), num_rails = ticks.last(0);
  Int32Array rails = Result(layers, {ranks, columns, num_rails});
  int32_t* out = rails.mutable_data();
  ForLayers(layers, [&](size_t layer) {
    return moe_lb::Spray(In(rows.Layer(layer, layers), ranks, columns), {ticks.Layer(layer, layers), num_rails},
                         options, Out(out + layer * ranks * columns * num_rails, ranks, columns * num_rails));
  });
  return rails;
}

// Adds a planner as a function of arrays, then of the fields of its options.
template <typename Options, typename Plans, typename... Arrays>
void Define(py::module_& module, const char* name, Plans (*plan)(const Options&, Arrays...),
            const std::array<const char*, sizeof...(Arrays)>& arrays, const char* doc) {
  std::apply(
      [&](const auto*... array) {
        std::apply(
            [&](const auto&... field) {
              module.def(
                  name,
                  [plan](Arrays... operands, std::decay_t<decltype(Options().*field.member)>... values) {
                    return plan(moe_lb::OptionsOf<Options>(values...), operands...);
                  },
                  py::arg(array)..., (py::arg(field.name) = Options().*field.member)..., doc);
            },
            Options::Fields());
      },
      arrays);
}

}  // namespace

PYBIND11_MODULE(_planning, module) {
  module.doc() = "Planners on NumPy arrays of int32; leading dimensions are layers and broadcast";
  Define(module, "greedy", &EditWith<&moe_lb::Greedy, moe_lb::GreedyOptions>, {"placement", "quota"},
         "Placement [..., R, S] and quota [..., E, R] after greedy moves; see jax_moe_lb.planners.greedy");
  Define(module, "eplb_plus", &EplbPlus, {"tokens", "placement"},
         "Placement [..., R, S] and quota [..., E, R] with all slots filled; see jax_moe_lb.planners.eplb");
  Define(module, "feplb", &EditWith<&moe_lb::Feplb, moe_lb::FeplbOptions>, {"placement", "quota"},
         "Placement [..., R, S] and quota [..., E, R] after moves of whole experts; see jax_moe_lb.planners.feplb");
  Define(
      module, "fastermoe", &FasterMoe, {"placement", "quota", "counts"},
      "Placement [..., R, S] and quota [..., E, R] with hot experts on all ranks; see jax_moe_lb.planners.fastermoe");
  Define(module, "ultraep", &EditWith<&moe_lb::UltraEp, moe_lb::UltraEpOptions>, {"placement", "quota"},
         "Placement [..., R, S] and quota [..., E, R] under a limit on loads; see jax_moe_lb.planners.ultraep");
  Define(module, "relay", &Relay, {"placement"},
         "Ranks [..., R, S] that the slots of a placement [..., R, S] copy from; see jax_moe_lb.planners.relay");
  Define(module, "spray", &Spray, {"rows", "ticks"}, "Rows [..., R, R, N] on each rail; see jax_moe_lb.planners.spray");
  Define(module, "exact", &Exact, {"counts", "num_slots"},
         "Placement [..., R, S] and quota [..., E, R] for counts [..., R, E]; see jax_moe_lb.planners.exact");
  constexpr const char* kInKernel =
      "The same from the kernel of GPUs, run on the CPU, and for each layer the estimated path of its longest block: "
      "cycles without and with overlapping loads, barriers of the block, operations of a warp, loads from shared "
      "memory";
  Define(module, "exact_kernel", &ExactKernel, {"counts", "num_slots"}, kInKernel);
  Define(module, "ultraep_kernel", &UltraEpKernel, {"placement", "quota"}, kInKernel);
  Define(module, "relay_kernel", &RelayKernel, {"placement"}, kInKernel);
}
