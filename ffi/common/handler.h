// Conversions for XLA handlers: buffers to views, and failures to errors.
#pragma once

#include <cstdint>
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

}  // namespace moe_lb
