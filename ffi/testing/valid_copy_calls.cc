// Valid calls to copy weights between ranks and to sum their gradients.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ffi/common/view.h"
#include "ffi/testing/valid_calls.h"

namespace moe_lb::testing {
namespace {

constexpr XLA_FFI_DataType kS32 = XLA_FFI_DataType_S32;

// Tables of wanted experts and their sources, and the kinds of weights.
class Peers {
 public:
  explicit Peers(Random& random)
      : participants_(random.Between(1, 3)),
        ranks_here_(random.Between(1, 2)),
        home_(random.Between(1, 3)),
        slots_(random.Below(5)),
        wanted_(Ints({ranks(), slots_}, Wanted(random))),
        relay_(Ints({ranks(), slots_}, Relay(random))) {
    for (int64_t kind = random.Between(1, 3); kind > 0; --kind) {
      std::vector<int64_t> dims;
      for (int64_t i = random.Below(3); i > 0; --i) dims.push_back(random.Chance(3) ? 300 : random.Below(6));
      experts_.push_back(dims);
    }
    attributes_["num_participants"] = Int(participants_);
    attributes_["num_lanes"] = Int(random.Chance(80) ? 1 : 2);
    attributes_["num_home"] = Int(home_);
    attributes_["chunk_bytes"] = Int(random.Between(1, 100));
    attributes_["timeout_s"] = Double(30);
    attributes_["site"] = Text("copy");
    attributes_["processes"] = IntArray({});
  }

  Call Start(Random& random) const {
    const XLA_FFI_DataType dtype = random.Of(std::vector<XLA_FFI_DataType>{XLA_FFI_DataType_F32, XLA_FFI_DataType_BF16,
                                                                           XLA_FFI_DataType_S8, XLA_FFI_DataType_F64});
    return MakeCall([&](const Array& place) {
      Operands operands = {{place, wanted_, relay_}, {Result(kS32, {2})}, {}};
      for (const std::vector<int64_t>& expert : experts_) {
        operands.args.push_back(Filled(random, dtype, Of(home_, expert)));
        operands.rets.push_back(Result(dtype, Of(slots_, expert)));
      }
      return operands;
    });
  }

  Call Sum(Random& random) const {
    const XLA_FFI_DataType dtype = random.Of(std::vector<XLA_FFI_DataType>{XLA_FFI_DataType_F32, XLA_FFI_DataType_BF16,
                                                                           XLA_FFI_DataType_F16, XLA_FFI_DataType_F64});
    return MakeCall([&](const Array& place) {
      Operands operands = {{place, wanted_}, {}, {}};
      for (const std::vector<int64_t>& expert : experts_) {
        operands.args.push_back(Filled(random, dtype, Of(slots_, expert)));
        operands.rets.push_back(Result(dtype, Of(home_, expert)));
      }
      return operands;
    });
  }

 private:
  int64_t ranks() const { return participants_ * ranks_here_; }

  std::vector<int32_t> Wanted(Random& random) const {
    std::vector<int32_t> wanted;
    for (int64_t i = 0; i < ranks() * slots_; ++i) {
      wanted.push_back(static_cast<int32_t>(random.Chance(20) ? -1 : random.Below(ranks() * home_)));
    }
    return wanted;
  }

  // From home, or from a lower rank with the same expert, which excludes cycles.
  std::vector<int32_t> Relay(Random& random) const {
    const View<const int32_t> wanted(reinterpret_cast<const int32_t*>(wanted_.bytes.data()), wanted_.size());
    std::vector<int32_t> relay(wanted.size(), -1);
    for (size_t slot = 0; slot < wanted.size(); ++slot) {
      const size_t rank = slot / static_cast<size_t>(slots_);
      for (size_t other = 0; other < rank * static_cast<size_t>(slots_); ++other) {
        if (wanted[other] != wanted[slot] || random.Chance(50)) continue;
        relay[slot] = static_cast<int32_t>(other / static_cast<size_t>(slots_));
      }
    }
    return relay;
  }

  // Experts of one device's ranks.
  std::vector<int64_t> Of(int64_t per_rank, const std::vector<int64_t>& expert) const {
    std::vector<int64_t> dims = expert;
    dims.insert(dims.begin(), ranks_here_ * per_rank);
    return dims;
  }

  Call MakeCall(const std::function<Operands(const Array& place)>& operands) const {
    Call call;
    call.attributes = attributes_;
    // Lanes are devices arriving as the same rank with the same tables; each lane is a generation of its own.
    const int64_t lanes = attributes_.at("num_lanes").bytes[0];
    for (int64_t device = 0; device < participants_ * lanes; ++device) {
      call.devices.push_back(operands(Ints({2}, {static_cast<int32_t>(device % participants_), 0})));
    }
    return call;
  }

  const int64_t participants_;
  const int64_t ranks_here_;
  const int64_t home_;
  const int64_t slots_;
  const Array wanted_;
  const Array relay_;
  std::vector<std::vector<int64_t>> experts_;
  Attributes attributes_;
};

// Rows taken by slots from homes, or returned to them.
Call CopyRows(Random& random) {
  const int64_t ranks = random.Between(1, 3), slots = random.Below(4), at_home = random.Below(30);
  const bool back = random.Chance(50);
  std::vector<int32_t> home, first, size, next(static_cast<size_t>(ranks), 0);
  int64_t taken = 0;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    int64_t landing = 0;
    for (int64_t slot = 0; slot < slots; ++slot) {
      const auto from = random.Chance(20) ? -1 : random.Below(ranks);
      int32_t* const begin = from < 0 ? nullptr : &next[static_cast<size_t>(from)];
      const auto rows = from < 0 ? 0 : static_cast<int32_t>(random.Between(0, at_home - *begin));
      home.push_back(static_cast<int32_t>(from));
      first.push_back(from < 0 ? 0 : *begin);
      size.push_back(rows);
      // Each row of a home goes to one taker, so that no two return to the same place.
      if (begin != nullptr) *begin += rows;
      landing += rows;
    }
    taken = std::max(taken, landing);
  }
  taken += random.Below(3);
  const int64_t read = back ? taken : at_home, written = back ? at_home : taken;
  std::vector<std::vector<int64_t>> kinds;
  for (int64_t kind = random.Between(1, 3); kind > 0; --kind) {
    kinds.emplace_back();
    for (int64_t i = random.Below(3); i > 0; --i) kinds.back().push_back(random.Below(6));
  }
  Call call;
  call.attributes = {{"num_participants", Int(ranks)},
                     {"num_lanes", Int(1)},
                     {"num_home", Int(1)},
                     {"chunk_bytes", Int(1)},
                     {"timeout_s", Double(30)},
                     {"site", Text("rows")},
                     {"processes", IntArray({})},
                     {"back", Bool(back)},
                     {"num_kinds", Int(static_cast<int64_t>(kinds.size()))}};
  const int64_t num_passed = random.Below(3);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    Operands operands = {{Ints({2}, {static_cast<int32_t>(rank), 0}), Ints({ranks, slots}, home),
                          Ints({ranks, slots}, first), Ints({ranks, slots}, size)},
                         {Result(kS32, {2})},
                         {}};
    const auto of = [](int64_t rows, std::vector<int64_t> row) {
      row.insert(row.begin(), rows);
      return row;
    };
    for (const auto& row : kinds) operands.args.push_back(Filled(random, XLA_FFI_DataType_BF16, of(read, row)));
    const auto pass = [&](const Array& array) {
      if (random.Chance(70)) operands.aliases[operands.args.size()] = operands.rets.size();
      operands.args.push_back(array);
      operands.rets.push_back(Result(array.dtype, array.dims));
    };
    for (const auto& row : kinds) {
      if (back) pass(Filled(random, XLA_FFI_DataType_BF16, of(written, row)));
      if (!back) operands.rets.push_back(Result(XLA_FFI_DataType_BF16, of(written, row)));
    }
    for (int64_t i = 0; i < num_passed; ++i) pass(IntsBetween(random, {4}, -9, 9));
    call.devices.push_back(operands);
  }
  return call;
}

Call CopyStart(Random& random) { return Peers(random).Start(random); }

Call CopySum(Random& random) { return Peers(random).Sum(random); }

// A call after its start, which provides the ticket and the arrays.
Call CopyJoin(Random& random) {
  auto before = std::make_shared<Before>();
  before->handler = "moe_lb_copy_start";
  before->call = Peers(random).Start(random);
  Call call;
  for (const Operands& start : before->call.devices) {
    const std::vector<Array> slots(start.rets.begin() + 1, start.rets.end());
    // The start's operands follow its results, as in the program: they must live until the join.
    Operands join = {start.rets, slots, {}};
    join.args.insert(join.args.end(), start.args.begin() + 3, start.args.end());
    for (size_t kind = 0; kind < slots.size(); ++kind) {
      if (random.Chance(70)) join.aliases[1 + kind] = kind;
    }
    call.devices.push_back(join);
  }
  for (size_t i = 0; i < before->call.devices[0].rets.size(); ++i) before->wires[i] = i;
  call.before = before;
  return call;
}

}  // namespace

std::map<std::string, ValidCalls> ValidCopyCalls() {
  return {
      {"moe_lb_copy_start", {CopyStart}},
      {"moe_lb_copy_rows", {CopyRows}},
      {"moe_lb_copy_join", {CopyJoin}},
      {"moe_lb_copy_sum", {CopySum}},
  };
}

}  // namespace moe_lb::testing
