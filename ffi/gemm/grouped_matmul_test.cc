#include "ffi/gemm/grouped_matmul.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <fstream>
#include <functional>
#include <limits>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/common/testing.h"

namespace {

using namespace moe_lb;

const Instructions kAll[] = {Instructions::kBase, Instructions::kAvx2, Instructions::kAvx512,
                             Instructions::kAvx512Bf16};
const Pool kAlone = {1, nullptr};

// Threads ending before this object does.
class Threads {
 public:
  ~Threads() {
    for (std::thread& thread : threads_) thread.join();
  }
  Pool pool() {
    return {3, [this](std::function<void()> task) { threads_.emplace_back(std::move(task)); }};
  }

 private:
  std::vector<std::thread> threads_;
};

double Wide(double x) { return x; }
double Wide(float x) { return x; }
double Wide(Bf16 x) {
  const uint32_t bits = uint32_t{x.bits} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

template <typename T>
T From(double x) {
  if constexpr (std::is_same_v<T, Bf16>) {
    const auto value = static_cast<float>(x);
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return {static_cast<uint16_t>(bits >> 16)};
  } else {
    return static_cast<T>(x);
  }
}

// Relative to the largest sum.
template <typename T>
constexpr double kTolerance = std::is_same_v<T, double>  ? 1e-13
                              : std::is_same_v<T, float> ? 1e-5
                                                         : 1e-2;

struct Shape {
  size_t num_rows, depth, columns;
  std::vector<int32_t> sizes;
};

// Odd and whole panels, more depth than a piece, more rows than a block, and empty operands.
const std::vector<Shape> kShapes = {
    {40, 7, 5, {3, 0, 20, 1}},  {9, 1, 1, {2, 7}},      {300, 33, 50, {0, 270, 1}}, {64, 64, 96, {30, 34}},
    {20, 1030, 70, {9, 0, 11}}, {17, 40, 144, {0, 16}}, {5, 16, 16, {0, 0}},        {6, 3, 4, {}},
    {0, 4, 4, {0, 0}},          {4, 0, 48, {1, 2}},     {4, 5, 0, {1, 2}},          {21, 300, 48, {1, 2, 3, 4, 5, 6}},
};

template <typename T>
struct Case {
  explicit Case(const Shape& shape) : shape(shape) {
    std::mt19937 random(7);
    std::normal_distribution<double> normal;
    const size_t num_groups = shape.sizes.size();
    size_t used = 0;
    for (const int32_t size : shape.sizes) used += static_cast<size_t>(size);
    const auto fill = [&](std::vector<T>& values, size_t size, size_t valid) {
      for (size_t i = 0; i < size; ++i) {
        values.push_back(From<T>(i < valid ? normal(random) : std::numeric_limits<double>::quiet_NaN()));
      }
    };
    fill(rows, shape.num_rows * shape.depth, used * shape.depth);
    fill(others, shape.num_rows * shape.columns, used * shape.columns);
    fill(weights, num_groups * shape.depth * shape.columns, num_groups * shape.depth * shape.columns);
    fill(transposed, weights.size(), 0);
    for (size_t g = 0; g < num_groups; ++g) {
      for (size_t k = 0; k < shape.depth; ++k) {
        for (size_t n = 0; n < shape.columns; ++n) {
          const size_t start = g * shape.depth * shape.columns;
          transposed[start + n * shape.depth + k] = weights[start + k * shape.columns + n];
        }
      }
    }
  }

  View<const int32_t> sizes() const { return {shape.sizes.data(), shape.sizes.size()}; }
  MatrixView<const T> Rows() const { return {rows.data(), shape.num_rows, shape.depth}; }
  MatrixView<const T> Others() const { return {others.data(), shape.num_rows, shape.columns}; }

  std::vector<T> Product(bool by_transposed, const Pool& pool, Instructions instructions) const {
    const std::vector<T>& matrices = by_transposed ? transposed : weights;
    std::vector<T> out(shape.num_rows * shape.columns, From<T>(77));
    const Status bad = GroupedMatmul<T>(Rows(), {matrices.data(), matrices.size()}, by_transposed, sizes(),
                                        {out.data(), shape.num_rows, shape.columns}, pool, instructions);
    EXPECT_EQ(bad.value_or(""), "");
    return out;
  }

  std::vector<SumOf<T>> Outer(const Pool& pool, Instructions instructions) const {
    std::vector<SumOf<T>> out(weights.size(), 3);
    const Status bad = GroupedOuter<T>(
        Rows(), Others(), sizes(), {out.data(), shape.sizes.size() * shape.depth, shape.columns}, pool, instructions);
    EXPECT_EQ(bad.value_or(""), "");
    return out;
  }

  const Shape& shape;
  std::vector<T> rows, others, weights, transposed;
};

template <typename T>
std::vector<double> ProductByLoops(const Case<T>& c) {
  std::vector<double> out(c.shape.num_rows * c.shape.columns);
  size_t row = 0;
  for (size_t g = 0; g < c.shape.sizes.size(); ++g) {
    for (int32_t i = 0; i < c.shape.sizes[g]; ++i, ++row) {
      for (size_t k = 0; k < c.shape.depth; ++k) {
        for (size_t n = 0; n < c.shape.columns; ++n) {
          out[row * c.shape.columns + n] +=
              Wide(c.rows[row * c.shape.depth + k]) * Wide(c.weights[(g * c.shape.depth + k) * c.shape.columns + n]);
        }
      }
    }
  }
  return out;
}

template <typename T>
std::vector<double> OuterByLoops(const Case<T>& c) {
  std::vector<double> out(c.weights.size(), 3);  // initial sums
  size_t row = 0;
  for (size_t g = 0; g < c.shape.sizes.size(); ++g) {
    for (int32_t i = 0; i < c.shape.sizes[g]; ++i, ++row) {
      for (size_t k = 0; k < c.shape.depth; ++k) {
        for (size_t n = 0; n < c.shape.columns; ++n) {
          out[(g * c.shape.depth + k) * c.shape.columns + n] +=
              Wide(c.rows[row * c.shape.depth + k]) * Wide(c.others[row * c.shape.columns + n]);
        }
      }
    }
  }
  return out;
}

template <typename T>
void ExpectClose(const std::vector<T>& got, const std::vector<double>& want, double tolerance) {
  EXPECT_EQ(got.size(), want.size());
  double largest = 0;
  for (const double x : want) largest = std::max(largest, std::abs(x));
  for (size_t i = 0; i < want.size(); ++i) EXPECT(std::abs(Wide(got[i]) - want[i]) <= tolerance * largest);
}

template <typename T>
bool SameBits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

template <typename T>
void EveryInstructionSetEqualsLoops() {
  for (const Instructions instructions : kAll) {
    if (instructions > BestInstructions()) continue;
    for (const Shape& shape : kShapes) {
      const Case<T> c(shape);
      ExpectClose(c.Product(false, kAlone, instructions), ProductByLoops(c), kTolerance<T>);
      ExpectClose(c.Product(true, kAlone, instructions), ProductByLoops(c), kTolerance<T>);
      ExpectClose(c.Outer(kAlone, instructions), OuterByLoops(c), std::is_same_v<T, double> ? 1e-13 : 1e-5);
    }
  }
}

template <typename T>
void ThreadsChangeNoBit() {
  for (const Shape& shape : kShapes) {
    const Case<T> c(shape);
    for (int repeat = 0; repeat < 3; ++repeat) {
      Threads threads;
      EXPECT(
          SameBits(c.Product(false, threads.pool(), BestInstructions()), c.Product(false, kAlone, BestInstructions())));
      EXPECT(
          SameBits(c.Product(true, threads.pool(), BestInstructions()), c.Product(true, kAlone, BestInstructions())));
      EXPECT(SameBits(c.Outer(threads.pool(), BestInstructions()), c.Outer(kAlone, BestInstructions())));
    }
  }
}

void APoolThatIsBusyIsNotWaitedFor() {
  const Case<float> c(kShapes[2]);
  std::vector<std::function<void()>> late;
  const Pool pool = {4, [&](std::function<void()> task) { late.push_back(std::move(task)); }};
  const auto out = c.Product(false, pool, BestInstructions());
  EXPECT(SameBits(out, c.Product(false, kAlone, BestInstructions())));
  EXPECT(!late.empty());
  for (const auto& task : late) task();  // no task is left
}

void EachTaskIsDoneOnceAndFailuresAreReported() {
  Threads threads;
  std::vector<std::atomic<int>> times(1000);
  const auto count = [&](int64_t i) {
    ++times[static_cast<size_t>(i)];
    return i != 990;
  };
  EXPECT(!ForEachTask(threads.pool(), 1000, count));
  for (const auto& time : times) EXPECT_EQ(time.load(), 1);
  EXPECT(ForEachTask(threads.pool(), 0, count));
}

// Sanitizers have memory of their own for each thread.
#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define MOE_LB_MEASURES_MEMORY
size_t ResidentBytes() {
  size_t total = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident * 4096;
}

// XLA has several threads for each device, and each of them runs a product at some time.
void LivingThreadsKeepNoMemory() {
  constexpr size_t kThreads = 48;
  const Shape shape = {300, 1030, 70, {256}};  // fills all operands in the scratch memory, of at least 98 KB
  const Case<float> c(shape);
  std::vector<float> out(shape.num_rows * shape.columns);
  std::mutex mutex;
  std::condition_variable changed;
  size_t turn = 0;
  const auto work = [&](size_t i) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return turn == i + 1; });
    const Status bad = GroupedMatmul<float>(c.Rows(), {c.weights.data(), c.weights.size()}, false, c.sizes(),
                                            {out.data(), shape.num_rows, shape.columns}, kAlone, BestInstructions());
    EXPECT_EQ(bad.value_or(""), "");
    ++turn;
    changed.notify_all();
    changed.wait(lock, [&] { return turn > kThreads + 1; });
  };
  std::vector<std::thread> threads;
  for (size_t i = 0; i < kThreads; ++i) threads.emplace_back(work, i);
  const auto next = [&](size_t until) {
    std::unique_lock<std::mutex> lock(mutex);
    ++turn;
    changed.notify_all();
    changed.wait(lock, [&] { return turn >= until; });
  };
  const size_t before = ResidentBytes();
  next(kThreads + 1);
  const size_t growth = ResidentBytes() - before;
  next(0);
  for (std::thread& thread : threads) thread.join();
  EXPECT(growth < kThreads * 98304 / 2);
}
#endif

void BadSizesAreNamed() {
  const auto refusal = [](std::vector<int32_t> sizes) {
    std::vector<float> rows(12), weights(18), out(8);
    const Status matmul = GroupedMatmul<float>({rows.data(), 4, 3}, {weights.data(), 18}, false, {sizes.data(), 3},
                                               {out.data(), 4, 2}, kAlone, BestInstructions());
    const Status outer = GroupedOuter<float>({rows.data(), 4, 3}, {out.data(), 4, 2}, {sizes.data(), 3},
                                             {weights.data(), 9, 2}, kAlone, BestInstructions());
    EXPECT(matmul == outer);
    return matmul.value_or("");
  };
  EXPECT_EQ(refusal({1, 1, 2}), "");
  EXPECT_EQ(refusal({1, -2, 2}), "group_sizes of group 1 is -2; expected at least 0");
  EXPECT_EQ(refusal({1, 2, 2}), "group_sizes sum to 5; expected at most 4, the number of rows");
  EXPECT_EQ(refusal({2147483647, 2147483647, 5}),
            "group_sizes sum to 4294967299; expected at most 4, the number of rows");
}

void ShapesThatDoNotFitAreRefused() {
  const std::vector<int32_t> sizes = {1};
  std::vector<float> data(100);
  const auto matmul = [&](size_t num_weights, size_t out_rows) {
    return GroupedMatmul<float>({data.data(), 4, 3}, {data.data(), num_weights}, false, {sizes.data(), 1},
                                {data.data(), out_rows, 2}, kAlone, BestInstructions())
        .value_or("");
  };
  EXPECT_EQ(matmul(7, 4), "weights have 7 entries; expected 6");
  EXPECT_EQ(matmul(6, 5), "the result has 5 rows; expected 4, as rows has");
}

}  // namespace

int main() {
  EveryInstructionSetEqualsLoops<float>();
  EveryInstructionSetEqualsLoops<double>();
  EveryInstructionSetEqualsLoops<Bf16>();
  ThreadsChangeNoBit<float>();
  ThreadsChangeNoBit<double>();
  ThreadsChangeNoBit<Bf16>();
  APoolThatIsBusyIsNotWaitedFor();
  EachTaskIsDoneOnceAndFailuresAreReported();
#ifdef MOE_LB_MEASURES_MEMORY
  LivingThreadsKeepNoMemory();
#endif
  BadSizesAreNamed();
  ShapesThatDoNotFitAreRefused();
}
