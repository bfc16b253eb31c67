// Valid calls to plan and copy at once, and their posts.
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ffi/testing/random_placement.h"
#include "ffi/testing/valid_calls.h"

namespace moe_lb::testing {
namespace {

constexpr XLA_FFI_DataType kS32 = XLA_FFI_DataType_S32;

// Plans with copies in the same call.
class Planned {
 public:
  explicit Planned(Random& random)
      : placement_(random),
        // One device may have all ranks, as in programs without a mesh axis of ranks.
        ranks_here_(random.Chance(70) ? 1 : placement_.ranks),
        quota_(IntsBetween(random, {placement_.experts, placement_.ranks}, 0, 50)) {
    for (int64_t kind = random.Between(1, 3); kind > 0; --kind) {
      std::vector<int64_t> dims;
      for (int64_t i = random.Below(3); i > 0; --i) dims.push_back(random.Below(6));
      experts_.push_back(dims);
    }
    for (int64_t i = random.Below(3); i > 0; --i) after_.push_back(IntsBetween(random, {random.Below(9)}, -9, 9));
  }

  const Placement& placement() const { return placement_; }

  Call Post(Random& random, const std::string& planner, const Attributes& options) const {
    Call call;
    call.attributes["planner"] = Text(planner);
    call.attributes["options"] = Dictionary(options);
    call.attributes["num_participants"] = Int(placement_.ranks / ranks_here_);
    call.attributes["num_lanes"] = Int(1);
    call.attributes["num_home"] = Int(placement_.home);
    call.attributes["chunk_bytes"] = Int(random.Between(1, 100));
    call.attributes["timeout_s"] = Double(30);
    call.attributes["site"] = Text("post");
    call.attributes["processes"] = IntArray({});
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

  // A call after its post, which provides the ticket and the slots.
  Call PlanAndCopy(Random& random, const std::string& planner, const Attributes& options) const {
    auto before = std::make_shared<Before>();
    before->handler = "moe_lb_copy_post";
    before->call = Post(random, planner, options);
    // The second call has no time-out attribute: its ranks meet at the site of the post.
    before->sets_timeout = true;
    Call call;
    call.attributes = options;
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
  std::vector<std::vector<int64_t>> experts_;
  std::vector<Array> after_;
};

Call CopyPost(Random& random) {
  const Planned planned(random);
  return planned.Post(random, "greedy", AttributesOf(RandomGreedy(random, planned.placement())));
}

Call PlanGreedyAndCopy(Random& random) {
  const Planned planned(random);
  return planned.PlanAndCopy(random, "greedy", AttributesOf(RandomGreedy(random, planned.placement())));
}

Call PlanFeplbAndCopy(Random& random) {
  const Planned planned(random);
  return planned.PlanAndCopy(random, "feplb", AttributesOf(RandomFeplb(random, planned.placement())));
}

}  // namespace

std::map<std::string, ValidCalls> ValidPlannedCopyCalls() {
  return {
      {"moe_lb_copy_post", {CopyPost}},
      {"moe_lb_plan_greedy_and_copy", {PlanGreedyAndCopy}},
      {"moe_lb_plan_feplb_and_copy", {PlanFeplbAndCopy}},
  };
}

}  // namespace moe_lb::testing
