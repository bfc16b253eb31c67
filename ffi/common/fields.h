// Fields of the options of a planner, returned by `Options::Fields()`: the one description from which attributes of XLA
// and arguments in Python are read.
#pragma once

#include <tuple>

namespace moe_lb {

template <typename Options, typename T>
struct Field {
  const char* name;
  T Options::* member;
};

template <typename Options, typename T>
constexpr Field<Options, T> Named(const char* name, T Options::* member) {
  return {name, member};
}

// Calls `use(name, value)` for every field; stops at the first failure and returns it.
template <typename Options, typename Use>
auto ForFields(Options& options, const Use& use) {
  return std::apply(
      [&](const auto&... field) {
        decltype(use("", options.*std::get<0>(Options::Fields()).member)) bad = {};
        static_cast<void>(((bad = use(field.name, options.*field.member), !bad) && ...));
        return bad;
      },
      Options::Fields());
}

// Options with these values, in the order of the fields.
template <typename Options, typename... T>
Options OptionsOf(const T&... values) {
  Options options;
  std::apply([&](const auto&... field) { ((options.*field.member = values), ...); }, Options::Fields());
  return options;
}

}  // namespace moe_lb
