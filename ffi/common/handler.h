// Conversions for XLA handlers: buffers to views, and failures to errors.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

#include "ffi/common/status.h"
#include "ffi/common/view.h"
#include "xla/ffi/api/ffi.h"

namespace moe_lb {

inline xla::ffi::Error ToError(const Status& status) {
  if (!status) return xla::ffi::Error::Success();
  return status->is_internal ? xla::ffi::Error::Internal(*status) : xla::ffi::Error::InvalidArgument(*status);
}

template <xla::ffi::DataType dtype>
auto ViewOf(xla::ffi::Buffer<dtype>& buffer) {
  using T = xla::ffi::NativeType<dtype>;
  return View<const T>(buffer.typed_data(), buffer.element_count());
}

template <xla::ffi::DataType dtype>
auto ViewOf(xla::ffi::ResultBuffer<dtype>& buffer) {
  using T = xla::ffi::NativeType<dtype>;
  return View<T>(buffer->typed_data(), buffer->element_count());
}

// Copies an operand to a result of its size in host memory if XLA has not aliased them.
inline void PassOn(const xla::ffi::AnyBuffer& in, const xla::ffi::AnyBuffer& out) {
  if (in.untyped_data() == out.untyped_data() || in.size_bytes() == 0) return;
  std::memcpy(out.untyped_data(), in.untyped_data(), in.size_bytes());
}

}  // namespace moe_lb
