// A block out of tiles. Part of kernel.h.
//
//   for each 2 KB of depth
//     for each panel of columns, kTileVectors vectors wide
//       pack this piece of b: [2 KB, panel] stays in the cache next to the core
//       for each tile of rows
//         out += a @ piece, the tile's sums in registers
//
// A piece is read from memory once per block; the next one is prefetched meanwhile. The same 2 KB of depth of `a` serve
// all panels from the second-level cache, at any depth. If sums go through sums_, which has room for one panel, the two
// outer loops change places.
namespace moe_lb {
namespace MOE_LB_KERNEL {

template <typename T, typename Elem, typename Out>
class BlockKernel {
  using Sum = Accumulator<Elem>;
  static constexpr int64_t kWidth = Vector<Elem>::kWidth;
  static constexpr int64_t kPanel = kTileVectors * kWidth;
  static constexpr int64_t kPieceElems = 2048 / sizeof(Elem);
  static constexpr int64_t kPieceDepth = kPieceElems * kValuesIn<Elem>;
  // Else `a` is converted first.
  static constexpr bool kSameElements = std::is_same_v<T, Elem>;
  static_assert(kColumnStep % kPanel == 0, "panels end where tasks end");

 public:
  static constexpr size_t kScratchBytes =
      sizeof(Elem) * static_cast<size_t>(kPieceElems * (kPanel + (kSameElements ? 0 : kMaxBlockRows))) +
      sizeof(Sum) * static_cast<size_t>(kMaxBlockRows * kPanel);

  BlockKernel(const Block<T, Out>& block, void* scratch)
      : block_(block),
        packed_b_(static_cast<Elem*>(scratch)),
        sums_(reinterpret_cast<Sum*>(packed_b_ + kPieceElems * kPanel)),
        packed_a_(reinterpret_cast<Elem*>(sums_ + kMaxBlockRows * kPanel)),
        by_depth_(std::is_same_v<Sum, Out> && (block.last_column - block.first_column) % kWidth == 0) {}

  void Run() {
    if (by_depth_) {
      ForEachPiece([&](int64_t r) { ForEachPanel([&](const Panel& panel) { MultiplyPiece(panel, r); }); });
    } else {
      ForEachPanel([&](const Panel& panel) {
        ForEachPiece([&](int64_t r) { MultiplyPiece(panel, r); });
        if (!IsDirect(panel)) CopySums(panel);
      });
    }
  }

 private:
  struct Panel {
    Panel(int64_t first, int64_t columns)
        : first(first), columns(columns), vectors((columns + kWidth - 1) / kWidth), width(vectors * kWidth) {}

    int64_t first;
    int64_t columns;
    int64_t vectors;
    int64_t width;
  };

  template <typename Do>
  void ForEachPanel(const Do& act) {
    for (int64_t n = block_.first_column; n < block_.last_column; n += kPanel) {
      act(Panel(n, Least(kPanel, block_.last_column - n)));
    }
  }

  template <typename Do>
  void ForEachPiece(const Do& act) {
    int64_t r = 0;
    do {  // also if depth is 0: the sums are then 0
      act(r);
      r += kPieceDepth;
    } while (r < block_.depth);
  }

  static int64_t Least(int64_t a, int64_t b) { return a < b ? a : b; }
  static int64_t Elems(int64_t depth) { return (depth + kValuesIn<Elem> - 1) / kValuesIn<Elem>; }

  // True if tiles write to `out`; else they write to sums_, which are narrowed and copied at the end.
  static bool IsDirect(const Panel& panel) { return std::is_same_v<Sum, Out> && panel.columns == panel.width; }

  // b at depth `r` and column `n`.
  const T* B(int64_t r, int64_t n) const {
    return block_.b_transposed ? block_.b + n * block_.b_stride + r : block_.b + r * block_.b_stride + n;
  }

  void MultiplyPiece(const Panel& panel, int64_t r) {
    const int64_t depth = Least(kPieceDepth, block_.depth - r);
    const int64_t num_tiles = (block_.rows + kTileRows - 1) / kTileRows;
    Prefetch ahead = NextPiece(panel, r, num_tiles * Elems(depth));
    Tile<Elem> tile{};
    tile.depth = Elems(depth);
    tile.add = r > 0 || (block_.adds && IsDirect(panel));
    SetA(panel, r, depth, tile);
    SetB(panel, r, depth, tile);
    SetOut(panel, tile);
    int64_t row = 0;
    for (int64_t i = 0; i < num_tiles; ++i) {
      const int64_t end = block_.rows * (i + 1) / num_tiles;  // tiles of nearly the same size
      MultiplyAny(end - row, panel.vectors, tile, ahead);
      tile.unpacked = nullptr;  // the first tile has packed it
      tile.a += (end - row) * tile.a_row_stride;
      tile.out += (end - row) * tile.out_stride;
      row = end;
    }
  }

  // Address of the data after depth `r` of this panel.
  Prefetch NextPiece(const Panel& panel, int64_t r, int64_t steps) const {
    const bool last_panel = panel.first + kPanel >= block_.last_column, last_piece = r + kPieceDepth >= block_.depth;
    if (last_panel && last_piece) return {};
    int64_t n = panel.first;
    if (by_depth_) {
      n = last_panel ? block_.first_column : n + kPanel;
      r = last_panel ? r + kPieceDepth : r;
    } else {
      n = last_piece ? n + kPanel : n;
      r = last_piece ? 0 : r + kPieceDepth;
    }
    const int64_t columns = Least(kPanel, block_.last_column - n);
    const int64_t depth = Least(kPieceDepth, block_.depth - r);
    constexpr int64_t kSize = sizeof(T);
    const bool transposed = block_.b_transposed;
    return {B(r, n), block_.b_stride * kSize, transposed ? columns : depth, (transposed ? depth : columns) * kSize,
            steps};
  }

  void SetA(const Panel& panel, int64_t r, int64_t depth, Tile<Elem>& tile) {
    const T* a = block_.a + r * block_.a_depth_stride;
    if constexpr (kSameElements) {
      tile.a = a;
      tile.a_row_stride = block_.a_row_stride;
      tile.a_depth_stride = block_.a_depth_stride;
    } else {
      // The first panel converts it for all, unless other pieces come between.
      const bool is_there = panel.first > block_.first_column && (by_depth_ || block_.depth <= kPieceDepth);
      const bool by_rows = block_.a_depth_stride == 1;
      if (!is_there && by_rows) PackRows(a, block_.a_row_stride, block_.rows, depth, packed_a_);
      if (!is_there && !by_rows) Pack(a, block_.a_depth_stride, depth, block_.rows, block_.rows, packed_a_);
      tile.a = packed_a_;
      tile.a_row_stride = by_rows ? Elems(depth) : 1;
      tile.a_depth_stride = by_rows ? 1 : block_.rows;
    }
  }

  void SetB(const Panel& panel, int64_t r, int64_t depth, Tile<Elem>& tile) {
    tile.b = packed_b_;
    const T* b = B(r, panel.first);
    if (block_.b_transposed) return PackTransposed(b, block_.b_stride, depth, panel.columns, panel.width, packed_b_);
    if constexpr (kSameElements) {
      if (panel.columns == kPanel) {
        tile.unpacked = b;
        tile.unpacked_stride = block_.b_stride;
        return;
      }
    }
    Pack(b, block_.b_stride, depth, panel.columns, panel.width, packed_b_);
  }

  void SetOut(const Panel& panel, Tile<Elem>& tile) {
    tile.out = sums_;
    tile.out_stride = panel.width;
    if constexpr (std::is_same_v<Sum, Out>) {
      if (IsDirect(panel)) {
        tile.out = block_.out + panel.first;
        tile.out_stride = block_.out_stride;
      }
    }
  }

  void CopySums(const Panel& panel) {
    for (int64_t i = 0; i < block_.rows; ++i) {
      Out* out = block_.out + i * block_.out_stride + panel.first;
      for (int64_t j = 0; j < panel.columns; ++j) {
        Sum sum = sums_[i * panel.width + j];
        if constexpr (std::is_same_v<Sum, Out>) sum += block_.adds ? out[j] : Sum{0};
        out[j] = Narrow<Out>(sum);
      }
    }
  }

  const Block<T, Out>& block_;
  Elem* const packed_b_;  // [kPieceElems, panel width]
  Sum* const sums_;       // [rows, panel width]
  Elem* const packed_a_;  // [rows, elements of depth], or the other way round
  const bool by_depth_;   // all panels are direct
};

}  // namespace MOE_LB_KERNEL
}  // namespace moe_lb
