// Marks of functions that planners on CPUs and kernels share.
#pragma once

#ifdef __CUDACC__
#define MOE_LB_DEVICE __device__ __forceinline__
#define MOE_LB_ANYWHERE __host__ __device__ __forceinline__
// Before a loop over an array of a thread: an array indexed at run time lies in memory.
#define MOE_LB_UNROLL _Pragma("unroll")
#else
#define MOE_LB_DEVICE inline
#define MOE_LB_ANYWHERE inline
#define MOE_LB_UNROLL
#endif
