// Attributes and operands at and beyond the bounds of the handlers of transports: which are refused, and how.
#include <chrono>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "ffi/common/testing.h"
#include "ffi/testing/fake_xla.h"
#include "ffi/testing/random_calls.h"
#include "ffi/transport/handlers.h"
#include "ffi/transport/peer_handlers.h"
#include "ffi/transport/peer_planning.h"

namespace {

using namespace moe_lb::testing;

constexpr XLA_FFI_DataType kS32 = XLA_FFI_DataType_S32, kBf16 = XLA_FFI_DataType_BF16;
constexpr int64_t kMost = std::numeric_limits<int32_t>::max();

const std::vector<moe_lb::Registrations>& AllParts() {
  static const auto* const parts = new std::vector<moe_lb::Registrations>{
      moe_lb::PeerRegistrations(), moe_lb::PeerPlanningRegistrations(), moe_lb::ExchangeRegistrations()};
  return *parts;
}

FakeXla& Xla() {
  static FakeXla* const xla = [] {
    auto* const made = new FakeXla;
    for (const auto& part : AllParts()) EXPECT(!made->Register(part));
    return made;
  }();
  return *xla;
}

// Returns the message of the instantiate stage, or of a call on one device if there are operands; empty for success.
std::string MessageOf(const std::string& name, const Attributes& attributes,
                      const std::optional<Operands>& operands = std::nullopt) {
  for (const auto& part : AllParts()) {
    for (const moe_lb::HandlerRegistration& handler : part.handlers) {
      if (name != handler.name) continue;
      CallSite site(Xla(), handler, attributes);
      if (!site.instantiated().ok || !operands) return site.instantiated().message;
      return site.Execute(*operands, 1, 0, PoolMode::kThreads)->Wait(std::chrono::seconds(30))->message;
    }
  }
  return "no handler " + name;
}

void ExpectRefusal(const std::string& message, const std::string& part) {
  if (message.find(part) == std::string::npos) EXPECT_EQ(message, part);
}

// Attributes of a call site of one device, with one of them changed.
Attributes SiteWith(const std::string& name = "num_lanes", const Attribute& value = Int(1)) {
  Attributes attributes = {{"num_participants", Int(1)}, {"num_lanes", Int(1)},     {"num_home", Int(2)},
                           {"chunk_bytes", Int(8)},      {"timeout_s", Double(30)}, {"site", Text("site")},
                           {"processes", IntArray({})}};
  attributes[name] = value;
  return attributes;
}

void AttributesOfACallSite() {
  const auto message = [](const std::string& name, int64_t value) {
    return MessageOf("moe_lb_copy_start", SiteWith(name, Int(value)));
  };
  ExpectRefusal(message("num_home", 0), "num_home is 0; expected at least 1");
  EXPECT_EQ(message("num_home", kMost), std::string());
  ExpectRefusal(message("num_home", kMost + 1), "num_home is 2147483648; expected at most 2147483647");
  ExpectRefusal(message("chunk_bytes", 0), "chunk_bytes is 0; expected at least 1");
  EXPECT_EQ(message("chunk_bytes", 1), std::string());
}

void AttributesOfAPost() {
  const auto message = [](int64_t plan_size, const std::string& planner, const Attributes& options) {
    Attributes attributes = SiteWith("plan_size", Int(plan_size));
    attributes["num_kinds"] = Int(1);
    attributes["planner"] = Text(planner);
    attributes["options"] = Dictionary(options);
    return MessageOf("moe_lb_copy_post", attributes);
  };
  const Attributes options = AttributesOf(moe_lb::GreedyOptions{1});
  ExpectRefusal(message(-1, "greedy", options), "plan_size is -1; expected 0 to 2147483647");
  EXPECT_EQ(message(0, "greedy", options), std::string());
  EXPECT_EQ(message(kMost, "greedy", options), std::string());
  ExpectRefusal(message(kMost + 1, "greedy", options), "plan_size is 2147483648; expected 0 to 2147483647");
  ExpectRefusal(message(0, "exact", options), "planner is exact; expected greedy or feplb");
  ExpectRefusal(message(0, "greedy", {{"domain", Int(1)}}), "expected 2 attributes, got 1");
  ExpectRefusal(message(0, "feplb", options), "expected 5 attributes, got 2");
  Attributes narrow = options;
  narrow["domain"] = Float(1);
  ExpectRefusal(message(0, "greedy", narrow), "no attribute domain of the expected type");
}

void OperandsOfCopies() {
  const Array place = Ints({2}, {0, 0}), table = Ints({1, 1}, {-1});
  ExpectRefusal(
      MessageOf("moe_lb_copy_start", SiteWith(),
                Operands{{place, table, table, Result(kBf16, {5})}, {Result(kS32, {2}), Result(kBf16, {1})}, {}}),
      "home of kind 0 has 5 experts; expected 2");
  Attributes rows = SiteWith("back", Bool(false));
  rows["num_kinds"] = Int(1);
  ExpectRefusal(MessageOf("moe_lb_copy_rows", rows,
                          Operands{{place, table, Ints({1, 1}, {0}), Ints({1, 1}, {0}), Result(kBf16, {4, 3})},
                                   {Result(kS32, {2}), Result(kBf16, {4, 5})},
                                   {}}),
                "rows of kind 0 and room for them have different shapes or dtypes");
  // Slots without other operands are enough.
  ExpectRefusal(MessageOf("moe_lb_copy_join", {},
                          Operands{{Ints({2}, {0, 0}), Result(kBf16, {1, 3})}, {Result(kBf16, {1, 3})}, {}}),
                "ticket is 0; expected one that start gave");
  Attributes post = SiteWith("plan_size", Int(0));
  post["num_kinds"] = Int(1);
  post["planner"] = Text("greedy");
  post["options"] = Dictionary(AttributesOf(moe_lb::GreedyOptions{1}));
  ExpectRefusal(MessageOf("moe_lb_copy_post", post,
                          Operands{{place, Result(kBf16, {2, 3})}, {Result(kS32, {2}), Result(kBf16, {1, 3})}, {}}),
                "got 0 operands of the planner; expected 2");
}

void OperandsOfAnExchange() {
  const Attributes attributes = {
      {"num_ranks", Int(1)}, {"num_lanes", Int(1)}, {"timeout_s", Double(30)}, {"site", Text("exchange")}};
  const auto message = [&](const Array& rows) {
    const Array none = Ints({1}, {0});
    return MessageOf("moe_lb_ragged_exchange", attributes,
                     Operands{{rows, rows, none, none, none, none, Ints({2}, {0, 0})}, {rows}, {}});
  };
  EXPECT_EQ(message(Result(kS32, {3})), std::string());
  ExpectRefusal(message(Result(kS32, {})), "operand has no dimension; expected [P, ...]");
  ExpectRefusal(message(Result(XLA_FFI_DataType_TOKEN, {3})), "operand has a type without bytes");
}

// An exception is no fault of an argument.
void ExceptionsOfPlanners() {
  const moe_lb::Status bad = moe_lb::Attempt(
      {"planner", {}, {}, [](const auto&, const auto&) -> moe_lb::Status { throw std::runtime_error("no memory"); }},
      {}, {});
  EXPECT(bad == moe_lb::Status("planner failed: no memory"));
  EXPECT(bad->is_internal);
}

}  // namespace

int main() {
  AttributesOfACallSite();
  AttributesOfAPost();
  OperandsOfCopies();
  OperandsOfAnExchange();
  ExceptionsOfPlanners();
}
