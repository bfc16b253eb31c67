// Vectors and conversions. Part of kernel.h.
namespace moe_lb {
namespace MOE_LB_KERNEL {

constexpr int kTileRows = MOE_LB_TILE_ROWS;
constexpr int kTileVectors = MOE_LB_TILE_VECTORS;

template <typename T>
struct Vector {
  typedef T Reg __attribute__((vector_size(MOE_LB_VECTOR_BYTES)));
  // A vector anywhere in memory, over elements of any type.
  typedef T Mem __attribute__((vector_size(MOE_LB_VECTOR_BYTES), aligned(1), may_alias));
  static constexpr int kWidth = MOE_LB_VECTOR_BYTES / sizeof(T);
};

template <typename T>
using Reg = typename Vector<T>::Reg;

typedef uint16_t HalfReg __attribute__((vector_size(MOE_LB_VECTOR_BYTES / 2)));
typedef uint16_t HalfMem __attribute__((vector_size(MOE_LB_VECTOR_BYTES / 2), aligned(1), may_alias));

#define MOE_LB_INLINE inline __attribute__((always_inline))

template <typename Elem>
MOE_LB_INLINE Reg<Elem> LoadSame(const void* at) {
  return *static_cast<const typename Vector<Elem>::Mem*>(at);
}

template <typename Elem>
MOE_LB_INLINE void Store(Reg<Elem> value, Elem* at) {
  *reinterpret_cast<typename Vector<Elem>::Mem*>(at) = value;
}

// Bfloat16 as the low or the high halves of words.
MOE_LB_INLINE Reg<uint32_t> Low(const Bf16* at) {
  const HalfReg half = *reinterpret_cast<const HalfMem*>(at);
  return __builtin_convertvector(half, Reg<uint32_t>);
}
MOE_LB_INLINE Reg<uint32_t> High(const Bf16* at) { return Low(at) << 16; }

// A vector of elements from a row of `b`, at neighbouring columns. A pair takes the other value from the row below.
template <typename Elem, typename T>
MOE_LB_INLINE Reg<Elem> LoadAcross(const T* at, int64_t stride) {
  if constexpr (std::is_same_v<Elem, Pair>)
    return Low(at) | High(at + stride);
  else if constexpr (std::is_same_v<Elem, T>)
    return LoadSame<Elem>(at);
  else
    return (Reg<Elem>)High(at);
}

// A vector of elements at neighbouring depth.
template <typename Elem, typename T>
MOE_LB_INLINE Reg<Elem> LoadAlong(const T* at) {
  if constexpr (std::is_same_v<Elem, T> || std::is_same_v<Elem, Pair>)
    return LoadSame<Elem>(at);
  else
    return (Reg<Elem>)High(at);
}

// One element; `left` values of depth exist, `stride` apart.
template <typename Elem, typename T>
inline Elem LoadOne(const T* at, int64_t stride, int64_t left) {
  if constexpr (std::is_same_v<Elem, T>) {
    return *at;
  } else if constexpr (std::is_same_v<Elem, Pair>) {
    return uint32_t{at[0].bits} | (left > 1 ? uint32_t{at[stride].bits} << 16 : 0);
  } else {
    const uint32_t bits = uint32_t{at->bits} << 16;
    float value;
    __builtin_memcpy(&value, &bits, sizeof(value));
    return value;
  }
}

// Round to nearest, ties to even; a NaN stays NaN.
template <typename T, typename Sum>
inline T Narrow(Sum sum) {
  if constexpr (std::is_same_v<T, Sum>) {
    return sum;
  } else {
    uint32_t bits;
    __builtin_memcpy(&bits, &sum, sizeof(bits));
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return {static_cast<uint16_t>(is_nan ? (bits >> 16) | 64 : rounded)};
  }
}

}  // namespace MOE_LB_KERNEL
}  // namespace moe_lb
