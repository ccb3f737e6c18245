// PAD_HD: scalar code with one definition for the CPU and, where nvcc compiles it, for CUDA kernels as well. Products
// and sums must round on their own in both: -ffp-contract=off there, --fmad=false here.
#pragma once

#if defined(__CUDACC__)
#define PAD_HD __host__ __device__ __forceinline__
#else
// into every clone of a function (cpu/simd.h), so that it is compiled for that clone's vectors
#define PAD_HD inline __attribute__((always_inline))
#endif
