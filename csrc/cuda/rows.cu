// Whole rows of logits: each is shared among the blocks of a row of the grid, whose parts one warp puts together.
#include <algorithm>

#include "common/noise.h"
#include "cuda/launch.cuh"

namespace pad {
namespace {

constexpr int THREADS = 256;
constexpr int VALUES = 16;                // of a thread in one step
constexpr size_t TILE = THREADS * VALUES; // ids of a block in one step
constexpr size_t MAX_SPLITS = 64;         // parts of a row
constexpr float INF = __builtin_huge_valf();

size_t splits_of(size_t vocab) { return std::min(MAX_SPLITS, (vocab + TILE - 1) / TILE); }

// A logit and its id as one number: the larger logit first, then the lower id. 0 is less than any of them.
using Ranked = unsigned long long;

__device__ __forceinline__ Ranked ranked(float z, uint32_t id) {
    return Ranked(uint32_t(order_key(z)) ^ 0x80000000u) << 32 | (0xFFFFFFFFu - id);
}
__device__ __forceinline__ int32_t id_of(Ranked r) { return int32_t(0xFFFFFFFFu - uint32_t(r)); }
__device__ __forceinline__ int32_t key_of(Ranked r) { return int32_t(uint32_t(r >> 32) ^ 0x80000000u); }
// order_key is its own inverse
__device__ __forceinline__ float logit_of(Ranked r) {
    const int32_t key = key_of(r);
    return float_of(key ^ ((key >> 31) & 0x7FFFFFFF));
}

// Statistics of some ids. Sums are relative to peak; a NaN makes total one.
struct Part {
    float peak, total, weighted, unused;
    Ranked top[3];
};

__device__ __forceinline__ Part empty_part() { return {-INF, 0.0f, 0.0f, 0.0f, {0, 0, 0}}; }

__device__ __forceinline__ void insert(Part &part, Ranked r) {
    if (r <= part.top[2])
        return;
    part.top[2] = r > part.top[1] ? part.top[1] : r;
    part.top[1] = r > part.top[0] ? part.top[0] : r > part.top[1] ? r : part.top[1];
    part.top[0] = r > part.top[0] ? r : part.top[0];
}

// Makes the sums relative to a peak that is no less: z - new = (z - old) + (old - new).
__device__ __forceinline__ void raise_peak(Part &part, float peak) {
    if (part.peak == peak)
        return;
    if (part.peak > -INF) {
        const float lower = part.peak - peak, shrink = expf(lower);
        // nothing of a part that is all below: 0 times -inf would be NaN
        part.weighted = shrink > 0.0f ? shrink * (part.weighted + lower * part.total) : 0.0f;
        part.total *= shrink;
    }
    part.peak = peak;
}

__device__ __forceinline__ void merge(Part &part, Part other) {
    const float peak = fmaxf(part.peak, other.peak);
    raise_peak(part, peak);
    raise_peak(other, peak);
    part.total += other.total;
    part.weighted += other.weighted;
    for (int k = 0; k < 3; ++k)
        insert(part, other.top[k]);
}

__device__ __forceinline__ Part shuffle_down(const Part &part, int offset) {
    Part other = empty_part();
    other.peak = __shfl_down_sync(~0u, part.peak, offset);
    other.total = __shfl_down_sync(~0u, part.total, offset);
    other.weighted = __shfl_down_sync(~0u, part.weighted, offset);
    for (int k = 0; k < 3; ++k)
        other.top[k] = __shfl_down_sync(~0u, part.top[k], offset);
    return other;
}

__device__ __forceinline__ void merge_warp(Part &part) {
    for (int offset = WARP / 2; offset > 0; offset /= 2)
        merge(part, shuffle_down(part, offset));
}

// The next VALUES ids of this thread, THREADS apart; -inf behind the end adds nothing.
template <typename T> __device__ __forceinline__ void add_tile(Part &part, const T *row, size_t first, size_t end) {
    float z[VALUES], peak = part.peak;
    for (int k = 0; k < VALUES; ++k) {
        const size_t id = first + size_t(k) * THREADS;
        z[k] = id < end ? to_float(row[id]) : -INF;
        peak = fmaxf(peak, z[k]); // skips NaN
        if (id < end && z[k] == z[k])
            insert(part, ranked(z[k], uint32_t(id)));
    }
    raise_peak(part, peak);
    for (int k = 0; k < VALUES; ++k) {
        const float below = z[k] - peak, e = z[k] == -INF ? 0.0f : expf(below);
        part.total += e; // NaN from a NaN, and from inf - inf
        part.weighted += e == 0.0f ? 0.0f : e * below;
    }
}

template <typename T> __global__ void __launch_bounds__(THREADS)
    row_parts(const T *logits, size_t vocab, size_t row_stride, Part *parts) {
    const T *row = logits + blockIdx.y * row_stride;
    Part part = empty_part();
    for (size_t first = blockIdx.x * TILE; first < vocab; first += gridDim.x * TILE)
        add_tile(part, row, first + threadIdx.x, vocab);
    merge_warp(part);
    __shared__ Part warps[THREADS / WARP];
    if (threadIdx.x % WARP == 0)
        warps[threadIdx.x / WARP] = part;
    __syncthreads();
    if (threadIdx.x >= WARP)
        return;
    part = threadIdx.x < THREADS / WARP ? warps[threadIdx.x] : empty_part();
    merge_warp(part);
    if (threadIdx.x == 0)
        parts[blockIdx.y * gridDim.x + blockIdx.x] = part;
}

__global__ void finish_stats(const Part *parts, int splits, int32_t *top_id, float *top_logit, float *lse,
                             float *entropy, float *margin) {
    const size_t row = blockIdx.x;
    Part part = empty_part();
    for (int s = int(threadIdx.x); s < splits; s += WARP)
        merge(part, parts[row * size_t(splits) + size_t(s)]);
    merge_warp(part);
    if (threadIdx.x != 0)
        return;
    const bool good = part.total == part.total && part.peak < INF && part.peak > -INF;
    const float nan = __int_as_float(0x7FC00000), log_total = logf(part.total);
    for (int k = 0; k < 3; ++k) {
        top_id[3 * row + size_t(k)] = good ? id_of(part.top[k]) : -1;
        top_logit[3 * row + size_t(k)] = good ? logit_of(part.top[k]) : nan;
    }
    lse[row] = good ? part.peak + log_total : nan;
    entropy[row] = good ? log_total - part.weighted / part.total : nan;
    margin[row] = good ? logit_of(part.top[0]) - logit_of(part.top[1]) : nan;
}

__device__ __forceinline__ Ranked best_of_warp(Ranked best) {
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        const Ranked other = __shfl_down_sync(~0u, best, offset);
        best = other > best ? other : best;
    }
    return best;
}

// A NaN ranks above +inf, so that it spoils its row as +inf does.
__device__ __forceinline__ Ranked scored(float z, float noise, float temperature, uint32_t id) {
    const float score = z + temperature * noise;
    return z != z ? Ranked(0xFFFFFFFFu) << 32 : ranked(score, id);
}

__global__ void __launch_bounds__(THREADS)
    pick_parts(const float *logits, size_t vocab, size_t row_stride, const uint32_t *positions, uint64_t seed,
               float temperature, Ranked *parts) {
    const float *row = logits + blockIdx.y * row_stride;
    const uint32_t position = positions[blockIdx.y];
    Ranked best = 0;
    for (size_t id = blockIdx.x * THREADS + threadIdx.x; id < vocab; id += gridDim.x * THREADS) {
        float noise = 0.0f;
        if (temperature > 0.0f)
            noise = gumbel_of(word_of(seed, position, uint32_t(id), PAD_PURPOSE_GUMBEL, 0));
        const Ranked r = scored(row[id], noise, temperature, uint32_t(id));
        best = r > best ? r : best;
    }
    best = best_of_warp(best);
    __shared__ Ranked warps[THREADS / WARP];
    if (threadIdx.x % WARP == 0)
        warps[threadIdx.x / WARP] = best;
    __syncthreads();
    if (threadIdx.x >= WARP)
        return;
    best = best_of_warp(threadIdx.x < THREADS / WARP ? warps[threadIdx.x] : 0);
    if (threadIdx.x == 0)
        parts[blockIdx.y * gridDim.x + blockIdx.x] = best;
}

__global__ void finish_pick(const Ranked *parts, int splits, int32_t *out_id) {
    Ranked best = 0;
    for (int s = int(threadIdx.x); s < splits; s += WARP) {
        const Ranked r = parts[blockIdx.x * size_t(splits) + size_t(s)];
        best = r > best ? r : best;
    }
    best = best_of_warp(best);
    if (threadIdx.x == 0)
        out_id[blockIdx.x] = key_of(best) < INF_KEY && key_of(best) > order_key(-INF) ? id_of(best) : -1;
}

pad_status check_grid(const char *name, size_t rows, size_t vocab, size_t least, size_t workspace_size) {
    if (const pad_status status = check_vocab(name, vocab, least))
        return status;
    // rows are the second dimension of a grid
    if (rows > 65535)
        return fail(PAD_ERROR_ARGUMENT, "%s: rows must be at most 65535, got %zu", name, rows);
    if (workspace_size < pad_cuda_workspace_size(rows, vocab))
        return fail(PAD_ERROR_ARGUMENT, "%s: workspace_size must be at least %zu, got %zu", name,
                    pad_cuda_workspace_size(rows, vocab), workspace_size);
    return PAD_OK;
}

} // namespace
} // namespace pad

extern "C" {

size_t pad_cuda_workspace_size(size_t rows, size_t vocab) { return rows * pad::splits_of(vocab) * sizeof(pad::Part); }

pad_status pad_cuda_row_stats(const void *logits, pad_dtype dtype, size_t rows, size_t vocab, size_t row_stride,
                              int32_t *top_id, float *top_logit, float *lse, float *entropy, float *margin,
                              void *workspace, size_t workspace_size, void *stream) {
    constexpr const char *name = "pad_cuda_row_stats";
    if (rows == 0)
        return PAD_OK;
    pad_status status = pad::check_pointers(name, logits, top_id, top_logit, lse, entropy, margin, workspace);
    if (!status)
        status = pad::check_dtype(name, dtype);
    if (!status)
        status = pad::check_grid(name, rows, vocab, 3, workspace_size);
    if (status)
        return status;
    const auto on = static_cast<cudaStream_t>(stream);
    const auto parts = static_cast<pad::Part *>(workspace);
    const dim3 grid(unsigned(pad::splits_of(vocab)), unsigned(rows));
    if (dtype == PAD_FLOAT32)
        pad::row_parts<<<grid, pad::THREADS, 0, on>>>(static_cast<const float *>(logits), vocab, row_stride, parts);
    else
        pad::row_parts<<<grid, pad::THREADS, 0, on>>>(static_cast<const pad::Bfloat16 *>(logits), vocab, row_stride,
                                                      parts);
    pad::finish_stats<<<unsigned(rows), pad::WARP, 0, on>>>(parts, int(grid.x), top_id, top_logit, lse, entropy,
                                                            margin);
    return pad::launch_status(name);
}

pad_status pad_cuda_gumbel_pick(const float *logits, size_t rows, size_t vocab, size_t row_stride,
                                const uint32_t *positions, uint64_t seed, float temperature, int32_t *out_id,
                                void *workspace, size_t workspace_size, void *stream) {
    constexpr const char *name = "pad_cuda_gumbel_pick";
    if (rows == 0)
        return PAD_OK;
    pad_status status = pad::check_pointers(name, logits, positions, out_id, workspace);
    if (!status)
        status = pad::check_grid(name, rows, vocab, 1, workspace_size);
    if (status)
        return status;
    if (!(temperature >= 0.0f && temperature <= PAD_MAX_TEMPERATURE))
        return pad::fail(PAD_ERROR_ARGUMENT, "%s: temperature must be in [0, 1e30], got %g", name,
                         static_cast<double>(temperature));
    const auto on = static_cast<cudaStream_t>(stream);
    const auto parts = static_cast<pad::Ranked *>(workspace);
    const dim3 grid(unsigned(pad::splits_of(vocab)), unsigned(rows));
    pad::pick_parts<<<grid, pad::THREADS, 0, on>>>(logits, vocab, row_stride, positions, seed, temperature, parts);
    pad::finish_pick<<<unsigned(rows), pad::WARP, 0, on>>>(parts, int(grid.x), out_id);
    return pad::launch_status(name);
}

} // extern "C"
