// The kernel, once per instruction set. Compiler flags would also apply to inline functions of the standard library,
// and the linker might keep those for all callers; a pragma and a namespace apply only to the kernel.
#include <sys/mman.h>

#include <algorithm>
#include <mutex>
#include <thread>
#include <vector>

#include "ffi/gemm/kernel_api.h"
#include "ffi/gemm/prefetch.h"

#ifdef __clang__
#pragma clang diagnostic ignored "-Wpsabi"
#else
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed to inline functions only
#endif

namespace moe_lb {
namespace {

// Two bfloat16 values, consecutive in depth. The instruction sums both products.
using Pair = uint32_t;

// Values of depth in an element of a packed operand.
template <typename Elem>
constexpr int64_t kValuesIn = std::is_same_v<Elem, Pair> ? 2 : 1;

template <typename Elem>
using Accumulator = std::conditional_t<std::is_same_v<Elem, Pair>, float, Elem>;

}  // namespace
}  // namespace moe_lb

// Tiles are as large as the registers allow: rows x vectors sums, the vectors of `b` and one value of `a`. The base set
// has 16 registers of 16 bytes, of which 4 x 2 + 2 + 1 are used.
#define MOE_LB_KERNEL base
#define MOE_LB_VECTOR_BYTES 16
#define MOE_LB_TILE_ROWS 4
#define MOE_LB_TILE_VECTORS 2
#include "ffi/gemm/kernel.h"

// Clang has another pragma for this, and no __builtin_shuffle: it compiles the first kernel alone.
#if defined(__x86_64__) && !defined(__clang__)
#define MOE_LB_X86_KERNELS

#pragma GCC push_options
#pragma GCC target("avx2,fma")
// 4 x 3 + 3 + 1 are all 16 registers.
#define MOE_LB_KERNEL avx2
#define MOE_LB_VECTOR_BYTES 32
#define MOE_LB_TILE_ROWS 4
#define MOE_LB_TILE_VECTORS 3
#include "ffi/gemm/kernel.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")
// 8 x 3 + 3 + 1 of the 32 registers are used. Without the option, GCC prefers vectors of 32 bytes on
// some of these processors.
#define MOE_LB_KERNEL avx512
#define MOE_LB_VECTOR_BYTES 64
#define MOE_LB_TILE_ROWS 8
#define MOE_LB_TILE_VECTORS 3
#include "ffi/gemm/kernel.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,prefer-vector-width=512")
#define MOE_LB_KERNEL avx512bf16
#define MOE_LB_VECTOR_BYTES 64
#define MOE_LB_TILE_ROWS 8
#define MOE_LB_TILE_VECTORS 3
#define MOE_LB_PAIRS
#include "ffi/gemm/kernel.h"
#pragma GCC pop_options
#endif

namespace moe_lb {
namespace {

// Memory for packed operands, page-aligned, so that no vector crosses a cache line. Blocks share a few pieces: fresh
// memory would page-fault in each block, and memory of each thread would grow until every thread of XLA's pools, of
// which each device has several, has run a product. It is mapped, because a piece freed on another thread would leave a
// hole in the heap of its first one.
class ScratchPool {
 public:
  explicit ScratchPool(size_t bytes) : bytes_(bytes) {}

  // Returns null if there is no memory.
  void* Take() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!free_.empty()) {
        void* const piece = free_.back();  // the last one used is in a cache
        free_.pop_back();
        return piece;
      }
    }
    void* const piece = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return piece == MAP_FAILED ? nullptr : piece;
  }

  void Give(void* piece) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (free_.size() < kMost) return free_.push_back(piece);
    }
    munmap(piece, bytes_);
  }

 private:
  // More threads than cores hold a piece at once only if the system suspends some of them.
  const size_t kMost = 2 * std::max<size_t>(1, std::thread::hardware_concurrency());
  const size_t bytes_;
  std::mutex mutex_;
  std::vector<void*> free_;
};

template <typename Kernel, typename T, typename Out>
bool MultiplyWith(const Block<T, Out>& block) {
  // Never destroyed: threads may run products while the process exits.
  static ScratchPool& pool = *new ScratchPool(Kernel::kScratchBytes);
  void* const scratch = pool.Take();
  if (scratch == nullptr) return false;
  Kernel(block, scratch).Run();
  pool.Give(scratch);
  return true;
}

}  // namespace

Instructions BestInstructions() {
#ifdef MOE_LB_X86_KERNELS
  // Check all four, because the pragma above lets the compiler use any of them.
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512) return __builtin_cpu_supports("avx512bf16") ? Instructions::kAvx512Bf16 : Instructions::kAvx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Instructions::kAvx2;
#endif
  return Instructions::kBase;
}

template <typename T, typename Out>
bool Multiply(Instructions instructions, const Block<T, Out>& block) {
  using Sum = SumOf<T>;
#ifdef MOE_LB_X86_KERNELS
  if constexpr (std::is_same_v<T, Bf16>) {
    if (instructions == Instructions::kAvx512Bf16) return MultiplyWith<avx512bf16::BlockKernel<T, Pair, Out>>(block);
  }
  if (instructions >= Instructions::kAvx512) return MultiplyWith<avx512::BlockKernel<T, Sum, Out>>(block);
  if (instructions == Instructions::kAvx2) return MultiplyWith<avx2::BlockKernel<T, Sum, Out>>(block);
#else
  static_cast<void>(instructions);
#endif
  return MultiplyWith<base::BlockKernel<T, Sum, Out>>(block);
}

template bool Multiply(Instructions, const Block<float, float>&);
template bool Multiply(Instructions, const Block<double, double>&);
template bool Multiply(Instructions, const Block<Bf16, Bf16>&);
template bool Multiply(Instructions, const Block<Bf16, float>&);

}  // namespace moe_lb
