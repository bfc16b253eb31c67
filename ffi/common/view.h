// Non-owning views of arrays, so that algorithms depend on neither XLA nor Python.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moe_lb {

// Indices are not checked: an algorithm checks all its arguments first, and inner loops must not pay for checks.
template <typename T>
class View {
 public:
  View(T* data, size_t size) : data_(data), size_(size) {}

  T& operator[](size_t i) const { return data_[i]; }
  T* data() const { return data_; }
  size_t size() const { return size_; }
  T* begin() const { return data_; }
  T* end() const { return data_ + size_; }

 private:
  T* data_;
  size_t size_;
};

// A row-major matrix, as in XLA and NumPy. `matrix[row]` is a View, `matrix[row][column]` an entry.
template <typename T>
class MatrixView {
 public:
  MatrixView(T* data, size_t rows, size_t columns) : data_(data), rows_(rows), columns_(columns) {}

  View<T> operator[](size_t row) const { return View<T>(data_ + row * columns_, columns_); }
  View<T> flat() const { return View<T>(data_, rows_ * columns_); }
  size_t rows() const { return rows_; }
  size_t columns() const { return columns_; }

 private:
  T* data_;
  size_t rows_;
  size_t columns_;
};

}  // namespace moe_lb
