// What the CUDA files share: refusals, the outcome of a launch, and the reading of either type of number.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include "abi_check.h"
#include "common/hd.h"
#include "pad_cuda.h"

namespace pad {

constexpr int WARP = 32;

inline pad_status check_dtype(const char *name, pad_dtype dtype) {
    if (dtype != PAD_FLOAT32 && dtype != PAD_BFLOAT16)
        return fail(PAD_ERROR_ARGUMENT, "%s: dtype must be a pad_dtype, got %d", name, int(dtype));
    return PAD_OK;
}

// Of the kernels just launched; waits for none of them.
inline pad_status launch_status(const char *name) {
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess)
        return fail(PAD_ERROR_CUDA, "%s: %s", name, cudaGetErrorString(error));
    return PAD_OK;
}

// bf16 is the upper half of an fp32
struct Bfloat16 {
    uint16_t bits;
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(Bfloat16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }

} // namespace pad
