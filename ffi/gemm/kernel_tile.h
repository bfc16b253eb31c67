// Innermost loops. Part of kernel.h.
namespace moe_lb {
namespace MOE_LB_KERNEL {

template <typename Elem>
struct Tile {
  using Sum = Accumulator<Elem>;

  const Elem* a;  // read one element at a time, at any strides: both layouts of the operand are as fast
  int64_t a_row_stride;
  int64_t a_depth_stride;
  Elem* b;                  // a packed panel
  const Elem* unpacked;     // if not null, the panel is read here and packed
  int64_t unpacked_stride;  // from one depth to the next
  int64_t depth;            // in elements
  Sum* out;
  int64_t out_stride;
  bool add;  // to the values of `out`
};

MOE_LB_INLINE void MultiplyAdd(Reg<float>& sum, Reg<float> a, Reg<float> b) { sum += a * b; }
MOE_LB_INLINE void MultiplyAdd(Reg<double>& sum, Reg<double> a, Reg<double> b) { sum += a * b; }
#ifdef MOE_LB_PAIRS
MOE_LB_INLINE void MultiplyAdd(Reg<float>& sum, Reg<Pair> a, Reg<Pair> b) {
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
}
#endif

// All sums of a tile of `num_rows` x `num_vectors` stay in registers; each vector of `b` meets every row. The loops
// over them must be unrolled: an array indexed at run time lies in memory.
template <typename Elem, int num_rows, int num_vectors, bool packs>
__attribute__((noinline)) void Multiply(const Tile<Elem>& tile, Prefetch& ahead) {
  using Sum = typename Tile<Elem>::Sum;
  constexpr int kWidth = Vector<Elem>::kWidth;
  Reg<Sum> sums[size_t{num_rows}][size_t{num_vectors}] = {};
#pragma GCC unroll 8
  for (int i = 0; i < num_rows; ++i) {
#pragma GCC unroll 3
    for (int j = 0; j < num_vectors; ++j) __builtin_prefetch(tile.out + i * tile.out_stride + j * kWidth, 1);
  }
  const Elem* a = tile.a;
  Elem* b = tile.b;
  const Elem* unpacked = tile.unpacked;
  const int64_t depth = tile.depth, a_row_stride = tile.a_row_stride, a_depth_stride = tile.a_depth_stride;
  const int64_t unpacked_stride = tile.unpacked_stride;
  for (int64_t r = 0; r < depth;) {
    ahead.Touch();
    const int64_t end = ahead.every() < depth - r ? r + ahead.every() : depth;
    for (; r < end; ++r) {
      Reg<Elem> columns[size_t{num_vectors}];
#pragma GCC unroll 3
      for (int j = 0; j < num_vectors; ++j) {
        columns[j] = LoadSame<Elem>(packs ? unpacked + j * kWidth : b + j * kWidth);
        if constexpr (packs) Store<Elem>(columns[j], b + j * kWidth);
      }
#pragma GCC unroll 8
      for (int i = 0; i < num_rows; ++i) {
        const Reg<Elem> row = a[i * a_row_stride] - Reg<Elem>{};  // in every lane
#pragma GCC unroll 3
        for (int j = 0; j < num_vectors; ++j) MultiplyAdd(sums[i][j], row, columns[j]);
      }
      a += a_depth_stride;
      b += num_vectors * kWidth;
      if constexpr (packs) unpacked += unpacked_stride;
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < num_rows; ++i) {
#pragma GCC unroll 3
    for (int j = 0; j < num_vectors; ++j) {
      Sum* out = tile.out + i * tile.out_stride + j * kWidth;
      Store<Sum>(tile.add ? sums[i][j] + LoadSame<Sum>(out) : sums[i][j], out);
    }
  }
}

// Multiply with sizes known at run time. Only whole panels are packed.
template <typename Elem, int rows = kTileRows, int vectors = kTileVectors>
void MultiplyAny(int64_t num_rows, int64_t num_vectors, const Tile<Elem>& tile, Prefetch& ahead) {
  if constexpr (vectors > 1) {
    if (num_vectors < vectors) return MultiplyAny<Elem, rows, vectors - 1>(num_rows, num_vectors, tile, ahead);
  }
  if constexpr (rows > 1) {
    if (num_rows < rows) return MultiplyAny<Elem, rows - 1, vectors>(num_rows, num_vectors, tile, ahead);
  }
  if constexpr (vectors == kTileVectors && !std::is_same_v<Elem, Pair>) {
    if (tile.unpacked != nullptr) return Multiply<Elem, rows, vectors, true>(tile, ahead);
  }
  Multiply<Elem, rows, vectors, false>(tile, ahead);
}

}  // namespace MOE_LB_KERNEL
}  // namespace moe_lb
