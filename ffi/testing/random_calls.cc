#include "ffi/testing/random_calls.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <utility>

namespace moe_lb::testing {
namespace {

constexpr unsigned char kPattern = 0xA5;
constexpr size_t kMaxElements = 4096;  // larger mutations are dropped, to keep cases fast

// Types bound by handlers are listed twice, or most cases would fail on their types alone.
const std::vector<XLA_FFI_DataType> kTypes = {
    XLA_FFI_DataType_S32,  XLA_FFI_DataType_S32, XLA_FFI_DataType_F32,  XLA_FFI_DataType_F32,  XLA_FFI_DataType_BF16,
    XLA_FFI_DataType_BF16, XLA_FFI_DataType_F16, XLA_FFI_DataType_F64,  XLA_FFI_DataType_S8,   XLA_FFI_DataType_U8,
    XLA_FFI_DataType_S16,  XLA_FFI_DataType_S64, XLA_FFI_DataType_U32,  XLA_FFI_DataType_U64,  XLA_FFI_DataType_PRED,
    XLA_FFI_DataType_C64,  XLA_FFI_DataType_S4,  XLA_FFI_DataType_C128, XLA_FFI_DataType_TOKEN};

// Ordinary values, and values at which products, sums and casts of sizes overflow.
const std::vector<int64_t> kEdges = {0,
                                     1,
                                     -1,
                                     2,
                                     -2,
                                     7,
                                     1000,
                                     -1000,
                                     std::numeric_limits<int32_t>::max(),
                                     std::numeric_limits<int32_t>::min(),
                                     std::numeric_limits<int32_t>::max() - int64_t{1},
                                     std::numeric_limits<int32_t>::max() / 2 + int64_t{1},
                                     std::numeric_limits<int32_t>::max() + int64_t{1},
                                     int64_t{1} << 32,
                                     (int64_t{1} << 32) + 1,
                                     int64_t{1} << 40,
                                     int64_t{1} << 62,
                                     std::numeric_limits<int64_t>::max(),
                                     std::numeric_limits<int64_t>::max() - 1,
                                     std::numeric_limits<int64_t>::min(),
                                     std::numeric_limits<int64_t>::min() + 1};

template <typename T>
std::vector<unsigned char> BytesOf(const T* values, size_t count) {
  std::vector<unsigned char> bytes(count * sizeof(T));
  if (count > 0) std::memcpy(bytes.data(), values, bytes.size());
  return bytes;
}

int64_t AnyInt(Random& random) { return random.Chance(50) ? random.Of(kEdges) : random.Between(-4, 40); }

double AnyDouble(Random& random) {
  const std::vector<double> edges = {0.0,
                                     -0.0,
                                     1.0,
                                     -1.0,
                                     1e-9,
                                     0.5,
                                     1e30,
                                     -1e30,
                                     std::numeric_limits<double>::infinity(),
                                     -std::numeric_limits<double>::infinity(),
                                     std::numeric_limits<double>::quiet_NaN()};
  return random.Of(edges);
}

Attribute AnyScalar(Random& random) {
  switch (random.Below(6)) {
    case 0:
      return Float(static_cast<float>(AnyDouble(random)));
    case 1:
      return Double(AnyDouble(random));
    case 2:
      return Bool(random.Chance(50));
    case 3: {
      Attribute narrow = Int(0);
      const auto value = static_cast<int32_t>(AnyInt(random));
      narrow.dtype = XLA_FFI_DataType_S32;
      narrow.bytes = BytesOf(&value, 1);
      return narrow;
    }
    default:
      return Int(AnyInt(random));
  }
}

Attribute AnyAttribute(Random& random, int depth = 0) {
  const int64_t kind = random.Below(depth < 2 ? 10 : 9);
  if (kind < 6) return AnyScalar(random);
  if (kind == 6) {
    std::string text;
    for (int64_t i = random.Below(12); i > 0; --i) text.push_back(static_cast<char>(random.Below(256)));
    return Text(text);
  }
  if (kind < 9) {
    std::vector<int64_t> values;
    for (int64_t i = random.Below(9); i > 0; --i) values.push_back(AnyInt(random));
    return IntArray(values);
  }
  Attribute dictionary;
  dictionary.type = XLA_FFI_AttrType_DICTIONARY;
  for (int64_t i = 0, count = random.Below(3); i < count; ++i) {
    dictionary.keys.push_back(std::string(1, static_cast<char>('a' + i)));
    dictionary.values.push_back(AnyAttribute(random, depth + 1));
  }
  return dictionary;
}

// Another value of the same type.
void ChangeValue(Random& random, Attribute& attribute) {
  if (attribute.type == XLA_FFI_AttrType_SCALAR && attribute.dtype == XLA_FFI_DataType_S64) {
    attribute = Int(AnyInt(random));
  } else if (attribute.type == XLA_FFI_AttrType_SCALAR && attribute.dtype == XLA_FFI_DataType_F32) {
    attribute = Float(static_cast<float>(AnyDouble(random)));
  } else if (attribute.type == XLA_FFI_AttrType_SCALAR && attribute.dtype == XLA_FFI_DataType_F64) {
    attribute = Double(AnyDouble(random));
  } else if (attribute.type == XLA_FFI_AttrType_SCALAR && attribute.dtype == XLA_FFI_DataType_PRED) {
    attribute = Bool(random.Chance(50));
  } else if (attribute.type == XLA_FFI_AttrType_ARRAY && attribute.dtype == XLA_FFI_DataType_S64) {
    std::vector<int64_t> values(attribute.bytes.size() / sizeof(int64_t));
    if (!values.empty()) std::memcpy(values.data(), attribute.bytes.data(), attribute.bytes.size());
    if (values.empty() || random.Chance(20)) {
      values.push_back(AnyInt(random));
    } else if (random.Chance(20)) {
      values.pop_back();
    } else {
      values[static_cast<size_t>(random.Below(static_cast<int64_t>(values.size())))] = AnyInt(random);
    }
    attribute = IntArray(values);
  } else if (attribute.type == XLA_FFI_AttrType_STRING) {
    attribute = Text(random.Chance(50) ? "" : "another");
  }
}

// Fills an array whose type or shape has changed.
void Refill(Random& random, Array& array, bool is_result) {
  array = is_result                             ? Result(array.dtype, array.dims)
          : array.dtype == XLA_FFI_DataType_S32 ? IntsBetween(random, array.dims, 0, 5)
                                                : Filled(random, array.dtype, array.dims);
}

bool IsTooLarge(const std::vector<int64_t>& dims) {
  size_t count = 1;
  for (const int64_t dim : dims) count *= static_cast<size_t>(std::max<int64_t>(dim, 1));
  return count > kMaxElements;
}

void ChangeShape(Random& random, std::vector<int64_t>& dims) {
  std::vector<int64_t> changed = dims;
  const auto any = [&] { return static_cast<size_t>(random.Below(static_cast<int64_t>(changed.size()))); };
  switch (random.Below(6)) {
    case 0:
      changed.push_back(random.Below(4));
      break;
    case 1:
      if (!changed.empty()) changed.erase(changed.begin() + static_cast<std::ptrdiff_t>(any()));
      break;
    case 2:
      if (!changed.empty()) changed[any()] = 0;
      break;
    case 3:
      if (!changed.empty()) changed[any()] += 1;
      break;
    case 4:
      if (!changed.empty()) {
        int64_t& dim = changed[any()];
        dim = std::max<int64_t>(dim - 1, 0);
      }
      break;
    default:
      if (!changed.empty()) changed[any()] = random.Chance(10) ? random.Below(1000) : random.Below(12);
      break;
  }
  // Drop a change making the array too large, to limit time and memory.
  if (!IsTooLarge(changed)) dims = std::move(changed);
}

void SetInt(Array& array, size_t i, int32_t value) {
  std::memcpy(array.bytes.data() + i * sizeof(value), &value, sizeof(value));
}

void ChangeInts(Random& random, Array& array) {
  if (array.dtype != XLA_FFI_DataType_S32 || array.bytes.empty()) return;
  const auto size = static_cast<int64_t>(array.bytes.size() / sizeof(int32_t));
  const int64_t changes = random.Chance(80) ? 1 : random.Between(1, size);
  for (int64_t i = 0; i < changes; ++i) {
    SetInt(array, static_cast<size_t>(random.Below(size)), static_cast<int32_t>(AnyInt(random)));
  }
}

// Applies one random change to all devices.
void OnAll(Call& call, Random& random, const std::function<void(Random&, Operands&)>& change) {
  // All devices run one program, so shapes and types are equal on all of them.
  const uint64_t seed = random.Next();
  for (Operands& operands : call.devices) {
    Random same(seed);
    change(same, operands);
  }
}

// The types and shapes of all results and arguments, by index.
Array* Pick(Random& random, Operands& operands, bool* is_result) {
  *is_result = random.Chance(40);
  std::vector<Array>& arrays = *is_result ? operands.rets : operands.args;
  if (arrays.empty()) return nullptr;
  return &arrays[static_cast<size_t>(random.Below(static_cast<int64_t>(arrays.size())))];
}

void ChangeOneShape(Random& random, Operands& operands) {
  bool is_result;
  if (Array* const array = Pick(random, operands, &is_result)) {
    ChangeShape(random, array->dims);
    // An alias needs two arrays of one size.
    operands.aliases.clear();
    Refill(random, *array, is_result);
  }
}

void ChangeOneType(Random& random, Operands& operands) {
  bool is_result;
  if (Array* const array = Pick(random, operands, &is_result)) {
    array->dtype = random.Of(kTypes);
    operands.aliases.clear();
    Refill(random, *array, is_result);
  }
}

void ChangeCount(Random& random, Operands& operands) {
  std::vector<Array>& arrays = random.Chance(50) ? operands.rets : operands.args;
  operands.aliases.clear();
  if (random.Chance(50)) {
    if (!arrays.empty()) arrays.pop_back();
  } else {
    arrays.push_back(arrays.empty() ? Result(random.Of(kTypes), {2}) : arrays.back());
  }
}

void ChangeSomeInts(Random& random, Operands& operands) {
  if (!operands.args.empty()) {
    ChangeInts(random, operands.args[static_cast<size_t>(random.Below(static_cast<int64_t>(operands.args.size())))]);
  }
}

void ChangeAttributes(Random& random, Attributes& attributes) {
  const int64_t kind = random.Below(10);
  if (attributes.empty() || kind == 0) {
    attributes["unknown"] = AnyAttribute(random);
    return;
  }
  const auto chosen = std::next(attributes.begin(), random.Below(static_cast<int64_t>(attributes.size())));
  if (kind == 1) {
    attributes.erase(chosen);
  } else if (kind == 2) {
    chosen->second = AnyAttribute(random);
  } else {
    ChangeValue(random, chosen->second);
  }
}

std::vector<int64_t> AnyDims(Random& random) {
  while (true) {
    std::vector<int64_t> dims;
    for (int64_t rank = random.Below(5); rank > 0; --rank) {
      dims.push_back(random.Chance(5) ? random.Below(1000) : random.Below(7));
    }
    if (!IsTooLarge(dims)) return dims;
  }
}

Array AnyArray(Random& random, XLA_FFI_DataType dtype, bool is_result) {
  Array array;
  array.dtype = dtype;
  array.dims = AnyDims(random);
  Refill(random, array, is_result);
  if (!is_result && random.Chance(30)) ChangeInts(random, array);
  return array;
}

}  // namespace

uint64_t Random::Next() {
  // Written out because the generators and distributions of the standard differ between libraries, and a case must be
  // reproducible everywhere.
  state_ += 0x9E3779B97F4A7C15u;
  uint64_t z = state_;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

std::string Describe(const Call& call) {
  std::string text;
  if (call.before != nullptr) text = "after " + call.before->handler + " " + Describe(call.before->call) + "\n  ";
  text += Describe(call.attributes);
  for (size_t device = 0; device < call.devices.size(); ++device) {
    text += "\n  device " + std::to_string(device) + ": " + Describe(call.devices[device]);
  }
  return text;
}

Array Ints(std::vector<int64_t> dims, const std::vector<int32_t>& values) {
  Array array;
  array.dims = std::move(dims);
  array.bytes = BytesOf(values.data(), values.size());
  array.Resize();
  return array;
}

Array IntsBetween(Random& random, std::vector<int64_t> dims, int64_t low, int64_t high) {
  Array array = Ints(std::move(dims), {});
  for (size_t i = 0; i < array.size(); ++i) SetInt(array, i, static_cast<int32_t>(random.Between(low, high)));
  return array;
}

Array Filled(Random& random, XLA_FFI_DataType dtype, std::vector<int64_t> dims) {
  Array array;
  array.dtype = dtype;
  array.dims = std::move(dims);
  array.Resize();
  // A boolean is 0 or 1, as XLA guarantees.
  const unsigned char mask = dtype == XLA_FFI_DataType_PRED ? 1 : 0xFF;
  for (unsigned char& byte : array.bytes) byte = static_cast<unsigned char>(random.Next()) & mask;
  return array;
}

Array Result(XLA_FFI_DataType dtype, std::vector<int64_t> dims) {
  Array array;
  array.dtype = dtype;
  array.dims = std::move(dims);
  array.Resize();
  std::fill(array.bytes.begin(), array.bytes.end(), dtype == XLA_FFI_DataType_PRED ? 1 : kPattern);
  return array;
}

Attribute Int(int64_t value) { return {XLA_FFI_AttrType_SCALAR, XLA_FFI_DataType_S64, BytesOf(&value, 1), {}, {}}; }
Attribute Float(float value) { return {XLA_FFI_AttrType_SCALAR, XLA_FFI_DataType_F32, BytesOf(&value, 1), {}, {}}; }
Attribute Double(double value) { return {XLA_FFI_AttrType_SCALAR, XLA_FFI_DataType_F64, BytesOf(&value, 1), {}, {}}; }
Attribute Bool(bool value) { return {XLA_FFI_AttrType_SCALAR, XLA_FFI_DataType_PRED, BytesOf(&value, 1), {}, {}}; }
Attribute Text(const std::string& value) {
  return {XLA_FFI_AttrType_STRING, XLA_FFI_DataType_U8, BytesOf(value.data(), value.size()), {}, {}};
}
Attribute IntArray(const std::vector<int64_t>& values) {
  return {XLA_FFI_AttrType_ARRAY, XLA_FFI_DataType_S64, BytesOf(values.data(), values.size()), {}, {}};
}
Attribute Dictionary(const Attributes& entries) {
  Attribute dictionary;
  dictionary.type = XLA_FFI_AttrType_DICTIONARY;
  for (const auto& [name, value] : entries) {
    dictionary.keys.push_back(name);
    dictionary.values.push_back(value);
  }
  return dictionary;
}

void Mutate(Random& random, Call& call) {
  for (int64_t count = random.Below(4); count > 0; --count) {
    const auto anywhere = [&](void (*change)(Random&, Operands&)) {
      if (random.Chance(90)) {
        OnAll(call, random, change);
      } else {
        change(random, call.devices[static_cast<size_t>(random.Below(static_cast<int64_t>(call.devices.size())))]);
      }
    };
    // Mutate values most often: the handler itself must check them, while XLA guarantees types and the number of
    // operands.
    const int64_t kind = random.Below(20);
    if (kind < 1) {
      anywhere(ChangeCount);
    } else if (kind < 2) {
      anywhere(ChangeOneType);
    } else if (kind < 6) {
      anywhere(ChangeOneShape);
    } else if (kind < 9) {
      ChangeAttributes(random, call.attributes);
    } else {
      ChangeSomeInts(random,
                     call.devices[static_cast<size_t>(random.Below(static_cast<int64_t>(call.devices.size())))]);
    }
  }
}

void Scramble(Random& random, Call& call) {
  OnAll(call, random, [](Random& same, Operands& operands) {
    operands.aliases.clear();
    for (Array& array : operands.args) array = AnyArray(same, array.dtype, false);
    for (Array& array : operands.rets) array = AnyArray(same, array.dtype, true);
  });
  for (auto& [name, attribute] : call.attributes) {
    if (random.Chance(50)) ChangeValue(random, attribute);
  }
}

Call AnyCall(Random& random) {
  const std::vector<std::string> names = {"a", "num_ranks", "rank", "domain", "timeout_s", "z"};
  Call call;
  for (int64_t count = random.Below(4); count > 0; --count) call.attributes[random.Of(names)] = AnyAttribute(random);
  Operands operands;
  for (int64_t count = random.Below(7); count > 0; --count) {
    operands.args.push_back(AnyArray(random, random.Of(kTypes), false));
  }
  for (int64_t count = random.Below(4); count > 0; --count) {
    operands.rets.push_back(AnyArray(random, random.Of(kTypes), true));
  }
  call.devices.assign(static_cast<size_t>(random.Between(1, 3)), operands);
  return call;
}

}  // namespace moe_lb::testing
