// The kernel for one instruction set. kernels.cc includes this several times, inside a target pragma, with
//   MOE_LB_KERNEL        a namespace of its own
//   MOE_LB_VECTOR_BYTES  bytes of a vector
//   MOE_LB_TILE_ROWS     rows and vectors of a tile of sums, all of which stay in registers
//   MOE_LB_TILE_VECTORS
//   MOE_LB_PAIRS         defined if bfloat16 are multiplied in pairs
// No guard on purpose, nor in the files below.
// clang-format off: each needs those before it.
#include "ffi/gemm/kernel_vectors.h"
#include "ffi/gemm/kernel_pack.h"
#include "ffi/gemm/kernel_tile.h"
#include "ffi/gemm/kernel_block.h"
// clang-format on

#undef MOE_LB_KERNEL
#undef MOE_LB_VECTOR_BYTES
#undef MOE_LB_TILE_ROWS
#undef MOE_LB_TILE_VECTORS
#undef MOE_LB_PAIRS
