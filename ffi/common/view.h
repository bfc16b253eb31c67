// Views of arrays that somebody else owns. Algorithms take these, so that they know neither XLA nor Python.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moe_lb {

// Entries are not checked against the size: an algorithm checks all its arguments before it reads any of them, and its
// inner loops must not pay for it again.
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

// A matrix is row-major, as XLA and NumPy have it. `matrix[row]` is a View, `matrix[row][column]` an entry.
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
