#include "ffi/gemm/grouped_matmul.h"

#include <sys/mman.h>

#include <algorithm>
#include <vector>

namespace moe_lb {
namespace {

Status CheckSizes(View<const int32_t> group_sizes, int64_t num_rows) {
  int64_t sum = 0;
  for (size_t g = 0; g < group_sizes.size(); ++g) {
    if (group_sizes[g] < 0) {
      return Refuse("group_sizes of group ", g, " is ", group_sizes[g], "; expected at least 0");
    }
    sum += group_sizes[g];
  }
  if (sum > num_rows) {
    return Refuse("group_sizes sum to ", sum, "; expected at most ", num_rows, ", the number of rows");
  }
  return Ok();
}

// Request 2 MB pages for a result. Page faults take most of the time of a large product of few rows, and large pages
// have fewer of them.
void AskForHugePages([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kHuge = 2 << 20;
  if (bytes < 4 * kHuge) return;
  const auto start = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (start + kHuge - 1) / kHuge * kHuge, last = (start + bytes) / kHuge * kHuge;
  // A hint: if the kernel of the system refuses it, only time is lost.
  madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

// Rows of the result computed by one task, with all or some of their columns.
struct Span {
  int64_t group;
  int64_t first;  // row of the result
  int64_t num_rows;
  int64_t depth_first;  // of the rows summed over, in GroupedOuter
  int64_t depth;
};

// Appends `num_rows` rows in spans of at most kMaxBlockRows, of nearly the same size: a last span of few rows would
// read all weights for little work.
void Cut(Span rows, std::vector<Span>& spans) {
  const int64_t parts = (rows.num_rows + kMaxBlockRows - 1) / kMaxBlockRows, first = rows.first;
  for (int64_t i = 0; i < parts; ++i) {
    Span part = rows;
    part.first = first + rows.num_rows * i / parts;
    part.num_rows = first + rows.num_rows * (i + 1) / parts - part.first;
    spans.push_back(part);
  }
}

// The largest span comes first, because the last task to start determines the total time.
void SortByWork(std::vector<Span>& spans) {
  std::stable_sort(spans.begin(), spans.end(),
                   [](const Span& a, const Span& b) { return a.num_rows * a.depth > b.num_rows * b.depth; });
}

// Runs `multiply(span, first_column, last_column)` over all spans and columns. Columns are cut only if there are too
// few tasks.
template <typename Multiply>
Status ForEachBlock(const std::vector<Span>& spans, int64_t num_columns, const Pool& pool, const Multiply& multiply) {
  constexpr int64_t kTasksPerThread = 8;  // so that the last ones are short
  const auto num_spans = static_cast<int64_t>(spans.size());
  if (num_spans == 0 || num_columns == 0) return Ok();
  // A task reads its rows again for its columns, so columns are cut only as far as the threads require, and into pieces
  // of at least four steps.
  const int64_t wanted = (kTasksPerThread * pool.num_threads + num_spans - 1) / num_spans;
  const int64_t most = (num_columns + 4 * kColumnStep - 1) / (4 * kColumnStep);
  const int64_t pieces = std::max<int64_t>(1, std::min(wanted, most));
  // With whole steps, all panels but the last ones are whole, which a kernel need not pad.
  const int64_t width = ((num_columns + pieces - 1) / pieces + kColumnStep - 1) / kColumnStep * kColumnStep;
  const int64_t chunks = (num_columns + width - 1) / width;
  const bool done = ForEachTask(pool, num_spans * chunks, [&](int64_t task) {
    const int64_t first = task % chunks * width;
    return multiply(spans[static_cast<size_t>(task / chunks)], first, std::min(first + width, num_columns));
  });
  return done ? Ok() : Problem("no memory for packed operands", true);
}

}  // namespace

template <typename T>
Status GroupedMatmul(MatrixView<const T> rows, View<const T> weights, bool transposed, View<const int32_t> group_sizes,
                     MatrixView<T> out, const Pool& pool, Instructions instructions) {
  if (out.rows() != rows.rows()) {
    return Refuse("the result has ", out.rows(), " rows; expected ", rows.rows(), ", as rows has");
  }
  const size_t num_weights = group_sizes.size() * rows.columns() * out.columns();
  if (weights.size() != num_weights) {
    return Refuse("weights have ", weights.size(), " entries; expected ", num_weights);
  }
  const auto num_rows = static_cast<int64_t>(rows.rows()), depth = static_cast<int64_t>(rows.columns());
  const auto columns = static_cast<int64_t>(out.columns());
  if (Status bad = CheckSizes(group_sizes, num_rows)) return bad;
  AskForHugePages(out.flat().data(), out.flat().size() * sizeof(T));

  std::vector<Span> spans;
  int64_t end = 0;
  for (size_t g = 0; g < group_sizes.size(); ++g) {
    Cut({static_cast<int64_t>(g), end, group_sizes[g], 0, depth}, spans);
    end += group_sizes[g];
  }
  SortByWork(spans);
  // Rows of no group cost least and go last. Their group is a placeholder: at depth 0 neither rows nor weights are
  // read, and the kernel writes 0.
  Cut({0, end, num_rows - end, 0, 0}, spans);  // of no group: empty sums
  return ForEachBlock(spans, columns, pool, [&](const Span& span, int64_t first, int64_t last) {
    return Multiply(instructions, Block<T, T>{rows.flat().data() + span.first * depth, depth, 1,
                                              weights.data() + span.group * depth * columns,
                                              transposed ? depth : columns, transposed, span.num_rows, span.depth,
                                              first, last, out.flat().data() + span.first * columns, columns});
  });
}

template <typename T>
Status GroupedOuter(MatrixView<const T> rows, MatrixView<const T> others, View<const int32_t> group_sizes,
                    MatrixView<SumOf<T>> out, const Pool& pool, Instructions instructions) {
  if (others.rows() != rows.rows()) {
    return Refuse("others has ", others.rows(), " rows; expected ", rows.rows(), ", as rows has");
  }
  if (out.rows() != group_sizes.size() * rows.columns() || out.columns() != others.columns()) {
    return Refuse("the result has shape [", out.rows(), ", ", out.columns(), "]; expected [",
                  group_sizes.size() * rows.columns(), ", ", others.columns(), "]");
  }
  if (Status bad = CheckSizes(group_sizes, static_cast<int64_t>(rows.rows()))) return bad;
  const auto width = static_cast<int64_t>(rows.columns()), columns = static_cast<int64_t>(others.columns());

  std::vector<Span> spans;
  int64_t end = 0;
  for (size_t g = 0; g < group_sizes.size(); ++g) {
    // An empty group leaves its sums unchanged.
    if (group_sizes[g] > 0)
      Cut({static_cast<int64_t>(g), static_cast<int64_t>(g) * width, width, end, group_sizes[g]}, spans);
    end += group_sizes[g];
  }
  SortByWork(spans);
  return ForEachBlock(spans, columns, pool, [&](const Span& span, int64_t first, int64_t last) {
    // The rows of this product are columns of `rows`, which is read with exchanged strides and never transposed in
    // memory.
    const int64_t column = span.first - span.group * width;
    return Multiply(instructions, Block<T, SumOf<T>>{rows.flat().data() + span.depth_first * width + column, 1, width,
                                                     others.flat().data() + span.depth_first * columns, columns, false,
                                                     span.num_rows, span.depth, first, last,
                                                     out.flat().data() + span.first * columns, columns, true});
  });
}

#define MOE_LB_INSTANTIATE(T)                                                                                       \
  template Status GroupedMatmul(MatrixView<const T>, View<const T>, bool, View<const int32_t>, MatrixView<T>,       \
                                const Pool&, Instructions);                                                         \
  template Status GroupedOuter(MatrixView<const T>, MatrixView<const T>, View<const int32_t>, MatrixView<SumOf<T>>, \
                               const Pool&, Instructions);
MOE_LB_INSTANTIATE(float)
MOE_LB_INSTANTIATE(double)
MOE_LB_INSTANTIATE(Bf16)

}  // namespace moe_lb
