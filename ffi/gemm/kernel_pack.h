// Operands, copied into the order in which the tiles read them. Part of kernel.h.
namespace moe_lb {
namespace MOE_LB_KERNEL {

// matrix[depth, columns] to packed[elements of depth, width]; 0 beyond the last column.
template <typename Elem, typename T>
void Pack(const T* matrix, int64_t stride, int64_t depth, int64_t columns, int64_t width, Elem* packed) {
  constexpr int kWidth = Vector<Elem>::kWidth;
  for (int64_t r = 0; r < depth; r += kValuesIn<Elem>) {
    int64_t j = 0;
    if (r + kValuesIn<Elem> <= depth) {
      for (; j + kWidth <= columns; j += kWidth) Store<Elem>(LoadAcross<Elem>(matrix + j, stride), packed + j);
    }
    for (; j < columns; ++j) packed[j] = LoadOne<Elem>(matrix + j, stride, depth - r);
    for (; j < width; ++j) packed[j] = 0;
    matrix += kValuesIn<Elem> * stride;
    packed += width;
  }
}

// matrix[rows, depth] to packed[rows, elements of depth].
template <typename Elem, typename T>
void PackRows(const T* matrix, int64_t stride, int64_t rows, int64_t depth, Elem* packed) {
  constexpr int64_t kValues = Vector<Elem>::kWidth * kValuesIn<Elem>;
  for (int64_t i = 0; i < rows; ++i, matrix += stride) {
    int64_t r = 0;
    for (; r + kValues <= depth; r += kValues, packed += Vector<Elem>::kWidth) {
      Store<Elem>(LoadAlong<Elem>(matrix + r), packed);
    }
    for (; r < depth; r += kValuesIn<Elem>) *packed++ = LoadOne<Elem>(matrix + r, 1, depth - r);
  }
}

#ifndef __clang__
// Transposes a square of vectors: exchanges the off-diagonal quarters of all squares of 2 * size, from small to large.
template <typename Elem, int size>
MOE_LB_INLINE void Transpose(Reg<Elem>* square) {
  constexpr int kWidth = Vector<Elem>::kWidth;
  typedef std::conditional_t<sizeof(Elem) == 4, int32_t, int64_t> Index;
  Reg<Index> low = {}, high = {};  // constants, once this is unrolled
  for (int j = 0; j < kWidth; ++j) {
    low[j] = (j & size) ? kWidth + j - size : j;
    high[j] = (j & size) ? kWidth + j : j + size;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i) {
    if (i & size) continue;
    const Reg<Elem> a = square[i], b = square[i + size];
    square[i] = __builtin_shuffle(a, b, low);
    square[i + size] = __builtin_shuffle(a, b, high);
  }
  if constexpr (2 * size < kWidth) Transpose<Elem, 2 * size>(square);
}

// A square of matrix[columns, depth] to one of packed[elements of depth, width].
template <typename Elem, typename T>
MOE_LB_INLINE void PackSquare(const T* matrix, int64_t stride, int64_t width, Elem* packed) {
  constexpr int kWidth = Vector<Elem>::kWidth;
  Reg<Elem> square[size_t{kWidth}];
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i) square[i] = LoadAlong<Elem>(matrix + i * stride);
  Transpose<Elem, 1>(square);
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i) Store<Elem>(square[i], packed + i * width);
}
#endif

// matrix[columns, depth] to packed[elements of depth, width]; 0 beyond the last column.
template <typename Elem, typename T>
void PackTransposed(const T* matrix, int64_t stride, int64_t depth, int64_t columns, int64_t width, Elem* packed) {
  constexpr int kWidth = Vector<Elem>::kWidth;
  for (int64_t j = 0; j < width; j += kWidth) {
    int64_t r = 0;
    Elem* out = packed + j;
#ifndef __clang__
    if (j + kWidth <= columns) {
      for (; r + kWidth * kValuesIn<Elem> <= depth; r += kWidth * kValuesIn<Elem>, out += kWidth * width) {
        PackSquare(matrix + j * stride + r, stride, width, out);
      }
    }
#endif
    for (; r < depth; r += kValuesIn<Elem>, out += width) {
      for (int64_t i = 0; i < kWidth; ++i) {
        out[i] = j + i < columns ? LoadOne<Elem>(matrix + (j + i) * stride + r, 1, depth - r) : Elem{0};
      }
    }
  }
}

}  // namespace MOE_LB_KERNEL
}  // namespace moe_lb
