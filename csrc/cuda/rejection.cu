// Speculative sampling along a chain, in one block: a row of the target's at a time, until a token is rejected. Nothing
// but sums and a maximum is kept of a row, so it needs no workspace.
#include "common/noise.h"
#include "cuda/launch.cuh"

namespace pad {
namespace {

constexpr int THREADS = 1024;

struct Rows {
    const float *logits;
    size_t vocab, row_stride;
    const float *q;
    size_t q_vocab, q_stride;
};

struct Draw {
    double temperature;
    uint64_t seed;
    const uint32_t *position, *round;
};

// The target's distribution of one row: p of a logit z is exp((z - peak) / temperature) / total.
struct Target {
    const float *z;
    size_t vocab;
    float peak;
    uint32_t first; // the lowest id of the largest logit
    double total, temperature;
    bool good;

    __device__ double prob(size_t id) const {
        if (id >= vocab)
            return 0.0;
        if (temperature == 0.0)
            return id == first ? 1.0 : 0.0;
        return exp((double(z[id]) - double(peak)) / temperature) / total;
    }
};

// A score and its id; of equal scores the lower id is better.
struct Best {
    double score;
    uint32_t id;
};

constexpr uint32_t NO_ID = 0xFFFFFFFFu;

__device__ __forceinline__ Best better(Best a, Best b) {
    return b.score > a.score || (b.score == a.score && b.id < a.id) ? b : a;
}

// Every thread gets the result. Sums in a fixed order: the same bits from every launch.
__device__ double sum_block(double x) {
    __shared__ double warps[THREADS / WARP];
    for (int offset = WARP / 2; offset > 0; offset /= 2)
        x += __shfl_xor_sync(~0u, x, offset);
    __syncthreads(); // the last call's values have been read
    if (threadIdx.x % WARP == 0)
        warps[threadIdx.x / WARP] = x;
    __syncthreads();
    x = warps[threadIdx.x % WARP];
    for (int offset = WARP / 2; offset > 0; offset /= 2)
        x += __shfl_xor_sync(~0u, x, offset);
    return x;
}

__device__ Best best_of_block(Best x) {
    __shared__ Best warps[THREADS / WARP];
    for (int offset = WARP / 2; offset > 0; offset /= 2)
        x = better(x, {__shfl_xor_sync(~0u, x.score, offset), __shfl_xor_sync(~0u, x.id, offset)});
    __syncthreads();
    if (threadIdx.x % WARP == 0)
        warps[threadIdx.x / WARP] = x;
    __syncthreads();
    x = warps[threadIdx.x % WARP];
    for (int offset = WARP / 2; offset > 0; offset /= 2)
        x = better(x, {__shfl_xor_sync(~0u, x.score, offset), __shfl_xor_sync(~0u, x.id, offset)});
    return x;
}

__device__ Target target_of(const float *z, size_t vocab, double temperature) {
    Best best = {-__builtin_huge_val(), NO_ID};
    bool has_nan = false;
    for (size_t id = threadIdx.x; id < vocab; id += THREADS) {
        has_nan |= z[id] != z[id];
        best = better(best, {double(z[id]), uint32_t(id)});
    }
    best = best_of_block(best);
    has_nan = __syncthreads_or(has_nan);
    const bool good = !has_nan && best.score < __builtin_huge_val() && best.score > -__builtin_huge_val();
    Target target = {z, vocab, float(best.score), best.id, 1.0, temperature, good};
    if (!good || temperature == 0.0)
        return target;
    double total = 0.0;
    for (size_t id = threadIdx.x; id < vocab; id += THREADS)
        total += target.prob(id);
    target.total = sum_block(total);
    return target;
}

// max(p - q, 0); q [q_vocab], or null where nothing was drawn: then it is one at the token.
__device__ __forceinline__ double left_of(const Target &target, const float *q, size_t q_vocab, int32_t token,
                                          size_t id) {
    if (!q)
        return id == size_t(token) ? 0.0 : target.prob(id);
    const double difference = target.prob(id) - (id < q_vocab ? double(q[id]) : 0.0);
    return difference < 0.0 ? 0.0 : difference; // a NaN stays one
}

// The argmax of ln p plus noise of this draw's own; behind a rejected token p is what q leaves of it.
__device__ int32_t draw_token(const Target &target, const Rows &rows, const float *q, int32_t rejected, uint64_t seed,
                              uint32_t position, uint32_t round) {
    double total = 0.0;
    // ids that only q knows have no p, but a NaN there counts
    const size_t width = q && rows.q_vocab > target.vocab ? rows.q_vocab : target.vocab;
    for (size_t id = threadIdx.x; rejected >= 0 && id < width; id += THREADS)
        total += left_of(target, q, rows.q_vocab, rejected, id);
    total = sum_block(total);
    Best best = {-__builtin_huge_val(), NO_ID};
    for (size_t id = threadIdx.x; id < target.vocab; id += THREADS) {
        const double p = total > 0.0 ? left_of(target, q, rows.q_vocab, rejected, id) / total : target.prob(id);
        if (!(p > 0.0))
            continue;
        const float noise = gumbel_of(word_of(seed, position, uint32_t(id), PAD_PURPOSE_RESIDUAL, round));
        best = better(best, {log(p) + double(noise), uint32_t(id)});
    }
    return int32_t(best_of_block(best).id);
}

__global__ void __launch_bounds__(THREADS) walk_chain(Rows rows, const int32_t *token, size_t n, Draw draw,
                                                      int32_t *path, int32_t *path_length, int32_t *end_token) {
    const uint32_t round = *draw.round;
    size_t node = 0;
    int32_t end = -1;
    for (;; ++node) {
        const uint32_t position = *draw.position + uint32_t(node);
        const Target target = target_of(rows.logits + node * rows.row_stride, rows.vocab, draw.temperature);
        if (!target.good)
            break;
        const float *q = rows.q && node + 1 < n ? rows.q + node * rows.q_stride : nullptr;
        const int32_t drafted = node + 1 < n ? token[node + 1] : -1;
        const double u = uniform_of(draw.seed, position, uint32_t(drafted), PAD_PURPOSE_ACCEPT, round);
        const double chance = !q ? 1.0 : size_t(drafted) < rows.q_vocab ? double(q[drafted]) : 0.0;
        // strictly below: a token that the target excludes does not stay at a draw of 0 either
        if (drafted >= 0 && u * chance < target.prob(size_t(drafted)))
            continue;
        end = draw_token(target, rows, q, drafted, draw.seed, position, round);
        break;
    }
    for (size_t i = threadIdx.x; i < n; i += THREADS)
        path[i] = i <= node ? int32_t(i) : -1;
    if (threadIdx.x == 0) {
        *path_length = int32_t(node + 1);
        *end_token = end;
    }
}

} // namespace
} // namespace pad

extern "C" pad_status pad_cuda_rejection_path(const float *logits, size_t vocab, size_t row_stride, const float *q,
                                              size_t q_vocab, size_t q_stride, const int32_t *token, size_t n,
                                              double temperature, uint64_t seed, const uint32_t *position,
                                              const uint32_t *round, int32_t *path, int32_t *path_length,
                                              int32_t *end_token, void *stream) {
    constexpr const char *name = "pad_cuda_rejection_path";
    pad_status status = pad::check_pointers(name, logits, token, position, round, path, path_length, end_token);
    if (!status)
        status = pad::check_vocab(name, vocab, 1);
    if (!status)
        status = pad::check_size(name, n);
    if (status)
        return status;
    if (n == 0)
        return pad::fail(PAD_ERROR_ARGUMENT, "%s: n must be at least 1", name);
    if (q && (q_vocab == 0 || q_vocab > INT32_MAX))
        return pad::fail(PAD_ERROR_ARGUMENT, "%s: q_vocab must be in [1, 2^31 - 1], got %zu", name, q_vocab);
    if (!(temperature >= 0.0 && temperature <= double(PAD_MAX_TEMPERATURE)))
        return pad::fail(PAD_ERROR_ARGUMENT, "%s: temperature must be in [0, 1e30], got %g", name, temperature);
    const pad::Rows rows = {logits, vocab, row_stride, q, q_vocab, q_stride};
    const pad::Draw draw = {temperature, seed, position, round};
    pad::walk_chain<<<1, pad::THREADS, 0, static_cast<cudaStream_t>(stream)>>>(rows, token, n, draw, path, path_length,
                                                                               end_token);
    return pad::launch_status(name);
}
