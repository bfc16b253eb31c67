// Text form of operands and attributes, for failure reports.
#include <cstring>
#include <sstream>

#include "ffi/testing/handler_calls.h"

namespace moe_lb::testing {
namespace {

const char* NameOf(XLA_FFI_DataType dtype) {
  switch (dtype) {
    case XLA_FFI_DataType_PRED:
      return "pred";
    case XLA_FFI_DataType_S8:
      return "s8";
    case XLA_FFI_DataType_U8:
      return "u8";
    case XLA_FFI_DataType_S16:
      return "s16";
    case XLA_FFI_DataType_S32:
      return "s32";
    case XLA_FFI_DataType_U32:
      return "u32";
    case XLA_FFI_DataType_S64:
      return "s64";
    case XLA_FFI_DataType_U64:
      return "u64";
    case XLA_FFI_DataType_F16:
      return "f16";
    case XLA_FFI_DataType_BF16:
      return "bf16";
    case XLA_FFI_DataType_F32:
      return "f32";
    case XLA_FFI_DataType_F64:
      return "f64";
    case XLA_FFI_DataType_C64:
      return "c64";
    case XLA_FFI_DataType_C128:
      return "c128";
    default:
      return "other";
  }
}

template <typename T>
T At(const std::vector<unsigned char>& bytes, size_t i) {
  T value;
  std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
  return value;
}

void WriteValues(std::ostream& out, XLA_FFI_DataType dtype, const std::vector<unsigned char>& bytes) {
  // Limit the report; the case can be repeated by its number.
  constexpr size_t kShown = 64;
  const size_t width = ByteWidth(dtype);
  const size_t count = width == 0 ? 0 : bytes.size() / width;
  for (size_t i = 0; i < count && i < kShown; ++i) {
    out << (i == 0 ? "" : " ");
    if (dtype == XLA_FFI_DataType_S32) {
      out << At<int32_t>(bytes, i);
    } else if (dtype == XLA_FFI_DataType_S64) {
      out << At<int64_t>(bytes, i);
    } else if (dtype == XLA_FFI_DataType_F32) {
      out << At<float>(bytes, i);
    } else if (dtype == XLA_FFI_DataType_F64) {
      out << At<double>(bytes, i);
    } else {
      out << "?";
    }
  }
  if (count > kShown) out << " ...";
}

void WriteArray(std::ostream& out, const Array& array, bool values) {
  out << NameOf(array.dtype) << "[";
  for (size_t i = 0; i < array.dims.size(); ++i) out << (i == 0 ? "" : ",") << array.dims[i];
  out << "]";
  // Only integers affect the control flow of a handler; other values would hide them in the report.
  if (!values || (array.dtype != XLA_FFI_DataType_S32 && array.dtype != XLA_FFI_DataType_S64)) return;
  out << "{";
  WriteValues(out, array.dtype, array.bytes);
  out << "}";
}

void WriteAttribute(std::ostream& out, const Attribute& attribute) {
  switch (attribute.type) {
    case XLA_FFI_AttrType_STRING:
      out << '"' << std::string(attribute.bytes.begin(), attribute.bytes.end()) << '"';
      return;
    case XLA_FFI_AttrType_DICTIONARY:
      out << "{";
      for (size_t i = 0; i < attribute.keys.size(); ++i) {
        out << attribute.keys[i] << "=";
        WriteAttribute(out, attribute.values[i]);
        out << ";";
      }
      out << "}";
      return;
    case XLA_FFI_AttrType_ARRAY:
    case XLA_FFI_AttrType_SCALAR:
      out << NameOf(attribute.dtype) << (attribute.type == XLA_FFI_AttrType_ARRAY ? "[" : "(");
      WriteValues(out, attribute.dtype, attribute.bytes);
      out << (attribute.type == XLA_FFI_AttrType_ARRAY ? "]" : ")");
  }
}

}  // namespace

size_t ByteWidth(XLA_FFI_DataType dtype) {
  switch (dtype) {
    case XLA_FFI_DataType_INVALID:
    case XLA_FFI_DataType_TOKEN:
      return 0;
    case XLA_FFI_DataType_S16:
    case XLA_FFI_DataType_U16:
    case XLA_FFI_DataType_F16:
    case XLA_FFI_DataType_BF16:
      return 2;
    case XLA_FFI_DataType_S32:
    case XLA_FFI_DataType_U32:
    case XLA_FFI_DataType_F32:
      return 4;
    case XLA_FFI_DataType_S64:
    case XLA_FFI_DataType_U64:
    case XLA_FFI_DataType_F64:
    case XLA_FFI_DataType_C64:
      return 8;
    case XLA_FFI_DataType_C128:
      return 16;
    default:
      return 1;
  }
}

size_t Array::size() const {
  size_t count = 1;
  for (const int64_t dim : dims) count *= static_cast<size_t>(dim);
  return count;
}

std::string Describe(const Attributes& attributes) {
  std::ostringstream out;
  for (const auto& [name, attribute] : attributes) {
    out << name << "=";
    WriteAttribute(out, attribute);
    out << " ";
  }
  return out.str();
}

std::string Describe(const Operands& operands) {
  std::ostringstream out;
  for (const Array& array : operands.args) {
    WriteArray(out, array, true);
    out << " ";
  }
  out << "-> ";
  for (const Array& array : operands.rets) {
    WriteArray(out, array, false);
    out << " ";
  }
  return out.str();
}

}  // namespace moe_lb::testing
