#include "ffi/testing/valid_calls.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "ffi/common/view.h"
#include "ffi/testing/plan_judges.h"

namespace moe_lb::testing {
namespace {

constexpr XLA_FFI_DataType kS32 = XLA_FFI_DataType_S32;

// ---- planners ------------------------------------------------------------------

const Array kStatus = Result(kS32, {1});

Call Lpt(Random& random) {
  const int64_t items = random.Below(40);
  const int64_t bins = random.Between(1, 12);
  Call call;
  call.attributes["num_bins"] = Int(bins);
  call.attributes["capacity"] = Int((items + bins - 1) / bins + random.Below(5));
  call.devices.push_back({{IntsBetween(random, {items}, 0, 100)}, {Result(kS32, {items}), kStatus}, {}});
  return call;
}

// Experts at home in the first slots of their rank, then replicas or nothing.
struct Placement {
  explicit Placement(Random& random)
      : domain(random.Between(1, 4)),
        ranks(domain * random.Between(1, 3)),
        home(random.Between(1, 3)),
        slots(home + random.Below(4)),
        experts(ranks * home) {
    std::vector<int32_t> values;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      for (int64_t slot = 0; slot < slots; ++slot) {
        const int64_t replica = random.Chance(50) ? random.Below(experts) : -1;
        values.push_back(static_cast<int32_t>(slot < home ? rank * home + slot : replica));
      }
    }
    array = Ints({ranks, slots}, values);
  }

  int64_t domain;
  int64_t ranks;
  int64_t home;
  int64_t slots;
  int64_t experts;
  Array array;
};

Call Quota(Random& random) {
  const Placement placement(random);
  const Array tokens = IntsBetween(random, {placement.experts}, 0, 100);
  Call call;
  call.devices.push_back(
      {{tokens, placement.array}, {Result(kS32, {placement.experts, placement.ranks}), kStatus}, {}});
  return call;
}

Call EplbPlus(Random& random) {
  const Placement placement(random);
  const Array tokens = IntsBetween(random, {placement.experts}, 0, 100);
  Call call;
  call.attributes["domain"] = Int(placement.domain);
  call.devices.push_back(
      {{tokens, placement.array},
       {Result(kS32, {placement.ranks, placement.slots}), Result(kS32, {placement.experts, placement.ranks}), kStatus},
       {}});
  return call;
}

Call Greedy(Random& random) {
  const Placement placement(random);
  const Array quota = IntsBetween(random, {placement.experts, placement.ranks}, 0, 50);
  Call call;
  call.attributes["domain"] = Int(placement.domain);
  call.attributes["min_tokens"] = Int(random.Between(1, 10));
  call.devices.push_back({{placement.array, quota},
                          {Result(kS32, {placement.ranks, placement.slots}), Result(kS32, quota.dims), kStatus},
                          {}});
  return call;
}

Call UltraEp(Random& random) {
  const Placement placement(random);
  const Array quota = IntsBetween(random, {placement.experts, placement.ranks}, 0, 50);
  Call call;
  call.attributes["domain"] = Int(placement.domain);
  call.attributes["eps"] = Float(static_cast<float>(random.Below(101)) / 100);
  call.attributes["min_tokens"] = Int(random.Between(1, 10));
  call.devices.push_back({{placement.array, quota},
                          {Result(kS32, {placement.ranks, placement.slots}), Result(kS32, quota.dims), kStatus},
                          {}});
  return call;
}

// No expert twice on a rank.
Call Relay(Random& random) {
  Placement placement(random);
  std::vector<int32_t> values(static_cast<size_t>(placement.ranks * placement.slots), -1);
  for (int64_t rank = 0; rank < placement.ranks; ++rank) {
    int32_t* slots = values.data() + rank * placement.slots;
    for (int64_t slot = 0; slot < placement.slots; ++slot) {
      const int64_t expert = slot < placement.home ? rank * placement.home + slot : random.Below(placement.experts);
      const auto value = static_cast<int32_t>(expert);
      if (std::find(slots, slots + slot, value) == slots + slot) slots[slot] = value;
    }
  }
  Call call;
  call.attributes["num_home"] = Int(placement.home);
  call.attributes["min_replicas"] = Int(random.Between(2, 5));
  call.attributes["max_relays"] = Int(random.Between(1, 9));
  call.attributes["min_gain"] = Int(random.Between(1, 3));
  const std::vector<int64_t> shape = {placement.ranks, placement.slots};
  call.devices.push_back({{Ints(shape, values)}, {Result(kS32, shape), kStatus}, {}});
  return call;
}

Call Exact(Random& random) {
  const Placement placement(random);
  Call call;
  call.attributes["domain"] = Int(placement.domain);
  call.attributes["eps"] = Double(static_cast<double>(random.Below(20)) / 100);
  call.attributes["max_fan_out"] = Int(random.Chance(50) ? random.Below(4) : INT64_MAX);
  call.attributes["localize"] = Bool(random.Chance(50));
  call.devices.push_back(
      {{IntsBetween(random, {placement.ranks, placement.experts}, 0, 50)},
       {Result(kS32, {placement.ranks, placement.slots}), Result(kS32, {placement.experts, placement.ranks}), kStatus},
       {}});
  return call;
}

// Of FEPLB, but for the domain.
void AddFeplbOptions(Random& random, Attributes* attributes) {
  (*attributes)["num_dynamic"] = Int(random.Between(1, 3));
  (*attributes)["max_num_dyn"] = Int(random.Between(1, 3));
  (*attributes)["tau"] = Int(random.Between(1, 10));
  (*attributes)["skip"] = Bool(random.Chance(50));
}

Call Feplb(Random& random) {
  Call call = Greedy(random);
  call.attributes.erase("min_tokens");
  AddFeplbOptions(random, &call.attributes);
  return call;
}

Call FasterMoe(Random& random) {
  const Placement placement(random);
  std::vector<int32_t> quota(static_cast<size_t>(placement.experts * placement.ranks), 0);
  const Array counts = IntsBetween(random, {placement.ranks, placement.experts}, 0, 50);
  for (int64_t expert = 0; expert < placement.experts; ++expert) {
    int32_t& at_home = quota[static_cast<size_t>(expert * placement.ranks + expert / placement.home)];
    for (int64_t rank = 0; rank < placement.ranks; ++rank) {
      int32_t tokens;
      std::memcpy(&tokens, counts.bytes.data() + 4 * (rank * placement.experts + expert), 4);
      at_home += tokens;
    }
  }
  Call call;
  call.attributes["domain"] = Int(placement.domain);
  call.attributes["min_saved"] = Int(random.Between(1, 10));
  call.devices.push_back(
      {{placement.array, Ints({placement.experts, placement.ranks}, quota), counts},
       {Result(kS32, {placement.ranks, placement.slots}), Result(kS32, {placement.experts, placement.ranks}), kStatus},
       {}});
  return call;
}

Call Spray(Random& random) {
  const int64_t rails = random.Between(1, 3);
  const int64_t domain = rails * random.Between(1, 2);
  const int64_t ranks = domain * random.Between(1, 3);
  std::vector<int32_t> ticks(static_cast<size_t>(rails), 1);
  for (int32_t& tick : ticks) tick = static_cast<int32_t>(random.Below(4));
  ticks[0] = 1;
  Call call;
  call.attributes["domain"] = Int(domain);
  call.attributes["chunks"] = Int(random.Between(1, 8));
  call.devices.push_back({{IntsBetween(random, {ranks, ranks}, 0, 100), Ints({rails}, ticks)},
                          {Result(kS32, {ranks, ranks * rails}), kStatus},
                          {}});
  return call;
}

// ---- the exchange of rows ------------------------------------------------------

// The slices that one rank sends and receives, as numbers that fit.
struct Slices {
  std::vector<int32_t> input_offsets;
  std::vector<int32_t> send_sizes;
  std::vector<int32_t> output_offsets;
  std::vector<int32_t> recv_sizes;
  int64_t operand_rows = 0;
  int64_t output_rows = 0;
};

// `per_pair` slices from every rank to every other; gaps between them.
std::vector<Slices> MakeSlices(Random& random, size_t ranks, size_t per_pair) {
  const size_t count = ranks * per_pair;
  const Slices empty = {std::vector<int32_t>(count),
                        std::vector<int32_t>(count),
                        std::vector<int32_t>(count),
                        std::vector<int32_t>(count),
                        0,
                        0};
  std::vector<Slices> all(ranks, empty);
  for (size_t sender = 0; sender < ranks; ++sender) {
    for (size_t receiver = 0; receiver < ranks; ++receiver) {
      for (size_t i = 0; i < per_pair; ++i) {
        Slices& from = all[sender];
        Slices& to = all[receiver];
        const size_t out = receiver * per_pair + i;
        const int64_t size = random.Chance(25) ? 0 : random.Below(5);
        from.operand_rows += random.Below(2);
        to.output_rows += random.Below(2);
        from.input_offsets[out] = static_cast<int32_t>(from.operand_rows);
        from.send_sizes[out] = static_cast<int32_t>(size);
        from.output_offsets[out] = static_cast<int32_t>(to.output_rows);
        to.recv_sizes[sender * per_pair + i] = static_cast<int32_t>(size);
        from.operand_rows += size;
        to.output_rows += size;
      }
    }
  }
  return all;
}

Call Exchange(Random& random) {
  const int64_t ranks = random.Between(1, random.Chance(80) ? 3 : 5);
  const int64_t groups = random.Chance(85) ? 1 : 2;
  const int64_t lanes = random.Chance(85) ? 1 : 2;
  const int64_t per_pair = random.Between(1, 3);
  const XLA_FFI_DataType dtype = random.Of(std::vector<XLA_FFI_DataType>{
      XLA_FFI_DataType_F32, XLA_FFI_DataType_BF16, XLA_FFI_DataType_S8, XLA_FFI_DataType_C64, kS32});
  std::vector<int64_t> row;
  for (int64_t i = random.Below(3); i > 0; --i) row.push_back(random.Chance(5) ? 400 : random.Below(6));
  const auto rows = [&](int64_t count) {
    std::vector<int64_t> dims = row;
    dims.insert(dims.begin(), count);
    return dims;
  };
  Call call;
  call.attributes["num_ranks"] = Int(ranks);
  call.attributes["num_lanes"] = Int(lanes);
  call.attributes["timeout_s"] = Double(30);
  call.attributes["site"] = Text("exchange");
  for (int64_t group = 0; group < groups; ++group) {
    const std::vector<Slices> slices = MakeSlices(random, static_cast<size_t>(ranks), static_cast<size_t>(per_pair));
    // All ranks have the same shapes: those of the one that needs most.
    int64_t operand_rows = 0;
    int64_t output_rows = 0;
    for (const Slices& one : slices) {
      operand_rows = std::max(operand_rows, one.operand_rows);
      output_rows = std::max(output_rows, one.output_rows);
    }
    for (int64_t device = 0; device < ranks * lanes; ++device) {
      const int64_t rank = device % ranks;
      const Slices& one = slices[static_cast<size_t>(rank)];
      const auto ints = [&](const std::vector<int32_t>& values) { return Ints({ranks * per_pair}, values); };
      const Array place = Ints({2}, {static_cast<int32_t>(rank), static_cast<int32_t>(group)});
      call.devices.push_back(
          {{Filled(random, dtype, rows(operand_rows)), Filled(random, dtype, rows(output_rows)),
            ints(one.input_offsets), ints(one.send_sizes), ints(one.output_offsets), ints(one.recv_sizes), place},
           {Result(dtype, rows(output_rows))},
           random.Chance(70) ? std::map<size_t, size_t>{{1, 0}} : std::map<size_t, size_t>{}});
    }
  }
  return call;
}

// ---- copies of weights ---------------------------------------------------------

// Who wants which experts, where from, and the kinds of weights that travel.
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

  // From home, or from a lower rank that wants the same expert: no circles.
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

  // The experts of one device's ranks.
  std::vector<int64_t> Of(int64_t per_rank, const std::vector<int64_t>& expert) const {
    std::vector<int64_t> dims = expert;
    dims.insert(dims.begin(), ranks_here_ * per_rank);
    return dims;
  }

  Call MakeCall(const std::function<Operands(const Array& place)>& operands) const {
    Call call;
    call.attributes = attributes_;
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

Call CopyStart(Random& random) { return Peers(random).Start(random); }

Call CopySum(Random& random) { return Peers(random).Sum(random); }

// After the start that gives it its ticket and its arrays.
Call CopyJoin(Random& random) {
  auto before = std::make_shared<Before>();
  before->handler = "moe_lb_copy_start";
  before->call = Peers(random).Start(random);
  Call call;
  for (const Operands& start : before->call.devices) {
    const std::vector<Array> slots(start.rets.begin() + 1, start.rets.end());
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

// Plans whose copies are made at once.
class Planned {
 public:
  explicit Planned(Random& random)
      : placement_(random),
        ranks_here_(random.Chance(70) ? 1 : placement_.ranks),
        quota_(IntsBetween(random, {placement_.experts, placement_.ranks}, 0, 50)),
        domain_(Int(placement_.domain)) {
    for (int64_t kind = random.Between(1, 3); kind > 0; --kind) {
      std::vector<int64_t> dims;
      for (int64_t i = random.Below(3); i > 0; --i) dims.push_back(random.Below(6));
      experts_.push_back(dims);
    }
    for (int64_t i = random.Below(3); i > 0; --i) after_.push_back(IntsBetween(random, {random.Below(9)}, -9, 9));
  }

  Call Post(Random& random) const {
    Call call;
    call.attributes["num_participants"] = Int(placement_.ranks / ranks_here_);
    call.attributes["num_lanes"] = Int(1);
    call.attributes["num_home"] = Int(placement_.home);
    call.attributes["chunk_bytes"] = Int(random.Between(1, 100));
    call.attributes["timeout_s"] = Double(30);
    call.attributes["site"] = Text("post");
    call.attributes["plan_size"] = Int(static_cast<int64_t>(placement_.array.size() + quota_.size()));
    call.attributes["num_kinds"] = Int(static_cast<int64_t>(experts_.size()));
    for (int64_t device = 0; device < placement_.ranks / ranks_here_; ++device) {
      Operands operands = {
          {Ints({2}, {static_cast<int32_t>(device), 0}), placement_.array, quota_}, {Result(kS32, {2})}, {}};
      for (const std::vector<int64_t>& expert : experts_) {
        operands.args.push_back(Filled(random, XLA_FFI_DataType_BF16, Of(placement_.home, expert)));
        operands.rets.push_back(Result(XLA_FFI_DataType_BF16, Of(placement_.slots - placement_.home, expert)));
      }
      for (const Array& array : after_) {
        if (random.Chance(70)) operands.aliases[operands.args.size()] = operands.rets.size();
        operands.args.push_back(array);
        operands.rets.push_back(Result(array.dtype, array.dims));
      }
      call.devices.push_back(operands);
    }
    return call;
  }

  // After its post, which gives it its ticket and its slots.
  //   options: of the planner, but for the domain.
  Call PlanAndCopy(Random& random, const Attributes& options) const {
    auto before = std::make_shared<Before>();
    before->handler = "moe_lb_copy_post";
    before->call = Post(random);
    before->sets_timeout = true;
    Call call;
    call.attributes = options;
    call.attributes["domain"] = domain_;
    const size_t kinds = experts_.size();
    for (const Operands& post : before->call.devices) {
      Operands plan = {{placement_.array, quota_, post.rets[0]},
                       {Result(kS32, placement_.array.dims), Result(kS32, quota_.dims), Result(kS32, {2})},
                       {}};
      const auto home = post.args.begin() + 3;
      plan.args.insert(plan.args.end(), home, home + static_cast<int64_t>(kinds));
      const auto pass = [&](const Array& array) {
        if (random.Chance(70)) plan.aliases[plan.args.size()] = plan.rets.size();
        plan.args.push_back(array);
        plan.rets.push_back(Result(array.dtype, array.dims));
      };
      for (size_t kind = 0; kind < kinds; ++kind) pass(post.rets[1 + kind]);
      for (const Array& array : after_) pass(array);
      call.devices.push_back(plan);
    }
    before->wires[0] = 2;
    for (size_t kind = 0; kind < kinds; ++kind) before->wires[1 + kind] = 3 + kinds + kind;
    call.before = before;
    return call;
  }

 private:
  std::vector<int64_t> Of(int64_t per_rank, const std::vector<int64_t>& expert) const {
    std::vector<int64_t> dims = expert;
    dims.insert(dims.begin(), ranks_here_ * per_rank);
    return dims;
  }

  const Placement placement_;
  const int64_t ranks_here_;
  const Array quota_;
  const Attribute domain_;
  std::vector<std::vector<int64_t>> experts_;
  std::vector<Array> after_;
};

Call CopyPost(Random& random) { return Planned(random).Post(random); }

Call PlanGreedyAndCopy(Random& random) {
  return Planned(random).PlanAndCopy(random, {{"min_tokens", Int(random.Between(1, 10))}});
}

Call PlanFeplbAndCopy(Random& random) {
  Attributes options;
  AddFeplbOptions(random, &options);
  return Planned(random).PlanAndCopy(random, options);
}

// ---- grouped products ----------------------------------------------------------

// Rows, sorted by group, of a type that can be multiplied; sizes around those of tiles.
class Groups {
 public:
  explicit Groups(Random& random)
      : dtype_(random.Of(
            std::vector<XLA_FFI_DataType>{XLA_FFI_DataType_F32, XLA_FFI_DataType_F64, XLA_FFI_DataType_BF16})),
        groups_(random.Below(5)),
        sizes_(IntsBetween(random, {groups_}, 0, random.Chance(20) ? 40 : 4)),
        num_rows_(random.Below(10)),
        depth_(Dimension(random)),
        columns_(Dimension(random)) {
    for (size_t i = 0; i < sizes_.bytes.size(); i += sizeof(int32_t)) num_rows_ += sizes_.bytes[i];  // each below 256
  }

  Call Matmul(Random& random) const {
    const bool transposed = random.Chance(50);
    const std::vector<int64_t> weights = {groups_, transposed ? columns_ : depth_, transposed ? depth_ : columns_};
    Call call;
    call.attributes["transposed"] = Int(transposed ? 1 : 0);
    call.devices.push_back({{Filled(random, dtype_, {num_rows_, depth_}), Filled(random, dtype_, weights), sizes_},
                            {Result(dtype_, {num_rows_, columns_})},
                            {}});
    return call;
  }

  Call Outer(Random& random) const {
    const XLA_FFI_DataType sums = dtype_ == XLA_FFI_DataType_BF16 ? XLA_FFI_DataType_F32 : dtype_;
    Call call;
    call.devices.push_back(
        {{Filled(random, dtype_, {num_rows_, depth_}), Filled(random, dtype_, {num_rows_, columns_}), sizes_},
         {Result(sums, {groups_, depth_, columns_})},
         {}});
    return call;
  }

 private:
  static int64_t Dimension(Random& random) { return random.Chance(10) ? random.Below(90) : random.Below(20); }

  const XLA_FFI_DataType dtype_;
  const int64_t groups_;
  const Array sizes_;
  int64_t num_rows_;
  const int64_t depth_;
  const int64_t columns_;
};

Call GroupedMatmul(Random& random) { return Groups(random).Matmul(random); }

Call GroupedOuter(Random& random) { return Groups(random).Outer(random); }

}  // namespace

const std::map<std::string, ValidCalls>& AllValidCalls() {
  static const auto* const all = new std::map<std::string, ValidCalls>{
      {"moe_lb_plan_lpt", {Lpt, false, JudgeLpt}},
      {"moe_lb_plan_quota", {Quota, false, JudgeQuota}},
      {"moe_lb_plan_greedy", {Greedy, false, JudgeEdit}},
      {"moe_lb_plan_eplb_plus", {EplbPlus, false, JudgeFill}},
      {"moe_lb_plan_feplb", {Feplb, false, JudgeEdit}},
      {"moe_lb_plan_fastermoe", {FasterMoe, false, JudgeEdit}},
      {"moe_lb_plan_ultraep", {UltraEp, false, JudgeEdit}},
      {"moe_lb_plan_relay", {Relay, false, JudgeRelay}},
      {"moe_lb_plan_exact", {Exact, false, JudgeExact}},
      {"moe_lb_plan_spray", {Spray, false, JudgeSpray}},
      {"moe_lb_ragged_exchange", {Exchange}},
      {"moe_lb_copy_start", {CopyStart}},
      {"moe_lb_copy_join", {CopyJoin}},
      {"moe_lb_copy_sum", {CopySum}},
      {"moe_lb_copy_post", {CopyPost}},
      {"moe_lb_plan_greedy_and_copy", {PlanGreedyAndCopy}},
      {"moe_lb_plan_feplb_and_copy", {PlanFeplbAndCopy}},
      {"moe_lb_grouped_matmul", {GroupedMatmul}},
      {"moe_lb_grouped_outer", {GroupedOuter}},
  };
  return *all;
}

}  // namespace moe_lb::testing
