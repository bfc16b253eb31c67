// Prefetches memory into the cache, a line at a time, during a computation.
#pragma once

#include <cstdint>

namespace moe_lb {

class Prefetch {
 public:
  Prefetch() = default;

  // Rows of `row_bytes` bytes, `stride` bytes apart, spread evenly over `steps` steps of the computation.
  Prefetch(const void* data, int64_t stride, int64_t num_rows, int64_t row_bytes, int64_t steps)
      : at_(static_cast<const char*>(data)), stride_(stride), num_rows_(num_rows), row_bytes_(row_bytes) {
    // A row starting inside a line reaches into one more.
    if (reinterpret_cast<uintptr_t>(data) % kLine != 0 || stride % kLine != 0) row_bytes_ += kLine - 1;
    const int64_t num_lines = num_rows * ((row_bytes_ + kLine - 1) / kLine);
    every_ = steps / (num_lines + 1);
    if (every_ < 1) every_ = 1;
  }

  // Steps from one `Touch` to the next.
  int64_t every() const { return every_; }

  // Prefetches the next line.
  inline __attribute__((always_inline)) void Touch() {
    if (num_rows_ == 0) return;
    __builtin_prefetch(at_ + column_);
    column_ += kLine;
    if (column_ < row_bytes_) return;
    column_ = 0;
    at_ += stride_;
    --num_rows_;
  }

 private:
  static constexpr int64_t kLine = 64;

  const char* at_ = nullptr;
  int64_t stride_ = 0;
  int64_t num_rows_ = 0;
  int64_t row_bytes_ = 0;
  int64_t column_ = 0;
  int64_t every_ = INT64_C(1) << 40;
};

}  // namespace moe_lb
