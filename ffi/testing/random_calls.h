// Random calls of handlers: valid calls with mutations, and arbitrary calls.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "ffi/testing/handler_calls.h"

namespace moe_lb::testing {

// SplitMix64: a case is reproduced by its number alone.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t Next();
  int64_t Below(int64_t bound) { return static_cast<int64_t>(Next() % static_cast<uint64_t>(bound)); }
  int64_t Between(int64_t low, int64_t high) { return low + Below(high - low + 1); }  // both included
  bool Chance(int percent) { return Below(100) < percent; }
  template <typename T>
  const T& Of(const std::vector<T>& choices) {
    return choices[static_cast<size_t>(Below(static_cast<int64_t>(choices.size())))];
  }

 private:
  uint64_t state_;
};

struct Before;

// A call of all devices of a program: one call site, executed once by each.
struct Call {
  Attributes attributes;
  std::vector<Operands> devices;         // at least one
  std::shared_ptr<const Before> before;  // previous call of the same program, if any
};

// A valid call whose results are operands of the next call on the same device. They replace the arrays of `Result`; an
// mutated operand keeps its value.
struct Before {
  std::string handler;
  Call call;
  std::map<size_t, size_t> wires;  // result index to argument index of the next call
  bool sets_timeout = false;       // its time-out applies to the next call
};

std::string Describe(const Call& call);

// ---- operands and attributes ---------------------------------------------------

Array Ints(std::vector<int64_t> dims, const std::vector<int32_t>& values);
Array IntsBetween(Random& random, std::vector<int64_t> dims, int64_t low, int64_t high);
// An array of random bytes.
Array Filled(Random& random, XLA_FFI_DataType dtype, std::vector<int64_t> dims);
// A result buffer, uninitialized as in XLA.
Array Result(XLA_FFI_DataType dtype, std::vector<int64_t> dims);

Attribute Int(int64_t value);
Attribute Float(float value);
Attribute Double(double value);
Attribute Bool(bool value);
Attribute Text(const std::string& value);
Attribute IntArray(const std::vector<int64_t>& values);
Attribute Dictionary(const Attributes& entries);

inline Attribute Scalar(int64_t value) { return Int(value); }
inline Attribute Scalar(float value) { return Float(value); }
inline Attribute Scalar(double value) { return Double(value); }
inline Attribute Scalar(bool value) { return Bool(value); }

// The fields of the options of a planner.
template <typename Options>
Attributes AttributesOf(const Options& options) {
  Attributes attributes;
  std::apply([&](const auto&... field) { ((attributes[field.name] = Scalar(options.*field.member)), ...); },
             Options::Fields());
  return attributes;
}

// ---- mutations -----------------------------------------------------------------

// Mutates one to three properties: types, shapes, values, the number of operands, attributes. Shapes and types stay
// equal on all devices, as XLA guarantees, in nine of ten cases; values differ by device.
void Mutate(Random& random, Call& call);

// Randomizes all shapes, values and attributes; keeps the operands, their types and the attributes' names.
void Scramble(Random& random, Call& call);

// Makes an arbitrary call, for any handler.
Call AnyCall(Random& random);

}  // namespace moe_lb::testing
