// From the numbers of rows to the accepted path and what the cache copies: a few small kernels on a few nodes.
#include "common/pivot.h"
#include "common/rule.h"
#include "cuda/launch.cuh"

namespace pad {
namespace {

constexpr int MLP_THREADS = 512;

struct Gathered {
    int32_t *top_id;
    float *top_logit, *lse, *entropy, *token_logit;
};

// One thread a node. rows: the statistics of the rows, in the fields of the same names.
template <typename T> __global__ void gather_nodes(pad_judged rows, const T *logits, size_t vocab, size_t row_stride,
                                                   const int32_t *token, const int32_t *parent, size_t n,
                                                   Gathered out) {
    const size_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    const size_t row = parent[i] < 0 ? i : size_t(parent[i]);
    for (size_t k = 0; k < 3; ++k) {
        out.top_id[3 * i + k] = rows.top_id[3 * row + k];
        out.top_logit[3 * i + k] = rows.top_logit[3 * row + k];
    }
    out.lse[i] = rows.lse[row];
    out.entropy[i] = rows.entropy[row];
    const bool is_known = token[i] >= 0 && size_t(token[i]) < vocab;
    out.token_logit[i] = is_known ? to_float(logits[row * row_stride + size_t(token[i])]) : -__builtin_huge_valf();
}

// out[u] = weight[u] . x + bias[u], a warp for each u in turn.
template <typename T>
__device__ void linear(const float *weight, const float *bias, const T *x, size_t size, int units, float *out) {
    const int lane = int(threadIdx.x) % WARP;
    for (int u = int(threadIdx.x) / WARP; u < units; u += MLP_THREADS / WARP) {
        float sum = 0.0f;
        for (size_t k = size_t(lane); k < size; k += WARP)
            sum += weight[size_t(u) * size + k] * to_float(x[k]);
        for (int offset = WARP / 2; offset > 0; offset /= 2)
            sum += __shfl_down_sync(~0u, sum, offset);
        if (lane == 0)
            out[u] = sum + bias[u];
    }
}

// One block a node.
template <typename T> __global__ void __launch_bounds__(MLP_THREADS)
    classify(pad_pivot_weights w, const T *hidden, size_t hidden_stride, const float *scalars, float *pivot_prob) {
    __shared__ float first[FIRST_UNITS], second[SECOND_UNITS], out[2];
    const size_t node = blockIdx.x;
    linear(w.hidden_weight, w.hidden_bias, hidden + node * hidden_stride, w.hidden_size, HIDDEN_UNITS, first);
    // without scalars this is their bias
    linear(w.scalars_weight, w.scalars_bias, scalars + node * w.num_scalars, w.num_scalars, SCALAR_UNITS,
           first + HIDDEN_UNITS);
    __syncthreads();
    linear(w.layer1_weight, w.layer1_bias, first, FIRST_UNITS, SECOND_UNITS, second);
    __syncthreads();
    if (threadIdx.x < SECOND_UNITS && second[threadIdx.x] < 0.0f)
        second[threadIdx.x] = 0.0f;
    __syncthreads();
    linear(w.layer2_weight, w.layer2_bias, second, SECOND_UNITS, 2, out);
    __syncthreads();
    if (threadIdx.x == 0)
        pivot_prob[node] = sigmoid(out[1] - out[0]);
}

struct DeviceForest {
    const int32_t *token, *parent, *row_pick;
    const uint64_t *tree_mask_bits;
    const int32_t *depth, *seq;
    uint32_t n, num_roots;
};

struct DevicePaths {
    uint64_t *kept;
    int32_t *path, *path_length, *end_token;
    uint8_t *overridden;
};

// What the threads of one block share: entry i belongs to row i, or to sequence i.
struct Shared {
    unsigned long long kept, by_override;
    uint8_t accept[MAX_FOREST];
    float score[MAX_FOREST];
    int32_t parent[MAX_FOREST], depth[MAX_FOREST], root[MAX_FOREST], path[MAX_FOREST][MAX_FOREST];
    uint64_t mask[MAX_FOREST];
    uint32_t length[MAX_FOREST];
};

__device__ void judge_row(const pad_rule &rule, const DeviceForest &f, const pad_judged &judged, Shared &s,
                          uint32_t i) {
    s.accept[i] = 0;
    s.parent[i] = -2;
    s.mask[i] = 0;
    if (i >= f.n)
        return;
    s.parent[i] = f.parent[i];
    s.depth[i] = f.depth[i];
    s.mask[i] = f.tree_mask_bits[i];
    if (f.parent[i] < 0)
        return;
    const Verdict verdict = judge(rule, judged, f.token[i], f.row_pick[f.parent[i]], i);
    s.accept[i] = verdict.accept;
    s.score[i] = verdict.score;
    if (verdict.overridden)
        atomicOr(&s.by_override, 1ull << i);
}

// The best score, then the lowest row: nobody takes its place.
__device__ void keep_row(Shared &s, uint32_t i, uint32_t n) {
    bool stays = s.parent[i] == -1 || s.accept[i];
    for (uint32_t j = 0; s.parent[i] >= 0 && j < n; ++j)
        if (j != i && s.parent[j] == s.parent[i] && s.accept[j])
            stays &= j < i ? is_better(s.score[i], s.score[j]) : !is_better(s.score[j], s.score[i]);
    if (stays)
        atomicOr(&s.kept, 1ull << i);
}

// One thread a sequence: what is on its path, and how much of that stays.
__device__ void cut_sequence(const pad_rule &rule, const DeviceForest &f, Shared &s, uint64_t history, uint32_t r) {
    uint32_t length = 0;
    uint64_t places = 0;
    const uint32_t root = uint32_t(s.root[r]);
    for (uint32_t i = root; i < f.n; ++i) {
        if (!(s.mask[i] >> root & 1) || (s.mask[i] & ~s.kept) != 0)
            continue;
        places |= (s.by_override >> i & 1) << length;
        s.path[r][length++] = int32_t(i);
    }
    s.length[r] = cut_path(rule, s.path[r], length, places, history, s.mask, s.depth, f.n);
}

__device__ void write_path(const DeviceForest &f, const Shared &s, const DevicePaths &out, uint32_t r) {
    uint32_t start = 0;
    for (uint32_t before = 0; before < r; ++before)
        start += s.length[before];
    for (uint32_t d = 0; d < s.length[r]; ++d) {
        const int32_t row = s.path[r][d];
        out.path[start + d] = row;
        out.overridden[row] = uint8_t(s.by_override >> row & 1);
    }
    out.path_length[r] = int32_t(s.length[r]);
    out.end_token[r] = f.row_pick[s.path[r][s.length[r] - 1]];
}

__global__ void __launch_bounds__(MAX_FOREST)
    relax(const pad_rule *rule_in, DeviceForest f, pad_judged judged, const uint64_t *history, DevicePaths out) {
    __shared__ Shared s;
    const uint32_t i = threadIdx.x;
    const pad_rule rule = *rule_in;
    if (i == 0)
        s.kept = s.by_override = 0;
    __syncthreads();
    judge_row(rule, f, judged, s, i);
    __syncthreads();
    if (i < f.n) {
        keep_row(s, i, f.n);
        uint32_t roots_before = 0;
        for (uint32_t j = 0; j < i; ++j)
            roots_before += s.parent[j] == -1;
        if (s.parent[i] == -1)
            s.root[roots_before] = int32_t(i);
        out.path[i] = -1;
        out.overridden[i] = 0;
    }
    __syncthreads();
    if (i < f.num_roots)
        cut_sequence(rule, f, s, history ? history[i] : 0, i);
    __syncthreads();
    if (i < f.num_roots)
        write_path(f, s, out, i);
    if (i == 0)
        *out.kept = s.kept;
}

__global__ void list_slots(const int32_t *rows, const int32_t *num_rows, int32_t max_rows, const int32_t *length,
                           int32_t scratch, int32_t ring, int32_t *source, int32_t *target) {
    const int32_t i = int32_t(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= max_rows)
        return;
    const int32_t given = min(*num_rows, max_rows), moved = min(given, ring), skipped = given - moved;
    source[i] = i < moved ? scratch - 1 - rows[skipped + i] : -1;
    target[i] = i < moved ? int32_t(scratch + (int64_t(*length) + skipped + i) % ring) : -1;
}

unsigned blocks_of(size_t n, unsigned threads) { return unsigned((n + threads - 1) / threads); }

} // namespace
} // namespace pad

extern "C" {

pad_status pad_cuda_gather_judged(const int32_t *row_top_id, const float *row_top_logit, const float *row_lse,
                                  const float *row_entropy, const void *logits, pad_dtype dtype, size_t vocab,
                                  size_t row_stride, const int32_t *token, const int32_t *parent, size_t n,
                                  int32_t *top_id, float *top_logit, float *lse, float *entropy, float *token_logit,
                                  void *stream) {
    constexpr const char *name = "pad_cuda_gather_judged";
    if (n == 0)
        return PAD_OK;
    pad_status status = pad::check_pointers(name, row_top_id, row_top_logit, row_lse, row_entropy, logits, token,
                                            parent, top_id, top_logit, lse, entropy, token_logit);
    if (!status)
        status = pad::check_dtype(name, dtype);
    if (!status)
        status = pad::check_vocab(name, vocab, 1);
    if (!status)
        status = pad::check_size(name, n);
    if (status)
        return status;
    const auto on = static_cast<cudaStream_t>(stream);
    const pad_judged rows = {row_top_id, row_top_logit, row_lse, row_entropy, nullptr, nullptr};
    const pad::Gathered out = {top_id, top_logit, lse, entropy, token_logit};
    if (dtype == PAD_FLOAT32)
        pad::gather_nodes<<<pad::blocks_of(n, 64), 64, 0, on>>>(rows, static_cast<const float *>(logits), vocab,
                                                                row_stride, token, parent, n, out);
    else
        pad::gather_nodes<<<pad::blocks_of(n, 64), 64, 0, on>>>(rows, static_cast<const pad::Bfloat16 *>(logits), vocab,
                                                                row_stride, token, parent, n, out);
    return pad::launch_status(name);
}

pad_status pad_cuda_pivot_mlp(const pad_pivot_weights *weights, const void *hidden, pad_dtype dtype,
                              size_t hidden_stride, const float *scalars, size_t n, float *pivot_prob, void *stream) {
    constexpr const char *name = "pad_cuda_pivot_mlp";
    if (n == 0)
        return PAD_OK;
    pad_status status = pad::check_pointers(name, weights, hidden, pivot_prob);
    if (!status)
        status = pad::check_weights(name, *weights);
    if (!status && weights->num_scalars > 0)
        status = pad::check_pointers(name, scalars);
    if (!status)
        status = pad::check_dtype(name, dtype);
    if (!status)
        status = pad::check_size(name, n);
    if (status)
        return status;
    const auto on = static_cast<cudaStream_t>(stream);
    if (dtype == PAD_FLOAT32)
        pad::classify<<<unsigned(n), pad::MLP_THREADS, 0, on>>>(*weights, static_cast<const float *>(hidden),
                                                                hidden_stride, scalars, pivot_prob);
    else
        pad::classify<<<unsigned(n), pad::MLP_THREADS, 0, on>>>(*weights, static_cast<const pad::Bfloat16 *>(hidden),
                                                                hidden_stride, scalars, pivot_prob);
    return pad::launch_status(name);
}

pad_status pad_cuda_relaxed_path(const pad_rule *rule, const int32_t *token, const int32_t *parent,
                                 const int32_t *row_pick, const uint64_t *tree_mask_bits, const int32_t *depth,
                                 const int32_t *seq, const pad_judged *judged, size_t n, size_t num_roots,
                                 const uint64_t *history, uint64_t *kept, int32_t *path, int32_t *path_length,
                                 int32_t *end_token, uint8_t *overridden, void *stream) {
    constexpr const char *name = "pad_cuda_relaxed_path";
    if (n == 0 && num_roots == 0)
        return PAD_OK;
    if (n > pad::MAX_FOREST || num_roots > n)
        return pad::fail(PAD_ERROR_ARGUMENT, "%s: n must be at most 64 and num_roots at most n, got %zu and %zu", name,
                         n, num_roots);
    pad_status status = pad::check_pointers(name, rule, token, parent, row_pick, tree_mask_bits, depth, seq, judged,
                                            kept, path, path_length, end_token, overridden);
    if (!status)
        status = pad::check_pointers(name, judged->top_id, judged->top_logit, judged->lse, judged->entropy,
                                     judged->token_logit);
    if (status)
        return status;
    const pad::DeviceForest forest = {token, parent, row_pick,    tree_mask_bits,
                                      depth, seq,    uint32_t(n), uint32_t(num_roots)};
    const pad::DevicePaths out = {kept, path, path_length, end_token, overridden};
    pad::relax<<<1, pad::MAX_FOREST, 0, static_cast<cudaStream_t>(stream)>>>(rule, forest, *judged, history, out);
    return pad::launch_status(name);
}

pad_status pad_cuda_commit_list(const int32_t *rows, const int32_t *num_rows, size_t max_rows, const int32_t *length,
                                size_t scratch, size_t ring, int32_t *source, int32_t *target, void *stream) {
    constexpr const char *name = "pad_cuda_commit_list";
    if (max_rows == 0)
        return PAD_OK;
    pad_status status = pad::check_pointers(name, rows, num_rows, length, source, target);
    if (!status)
        status = pad::check_size(name, max_rows);
    if (!status)
        status = pad::check_slots(name, scratch, ring);
    if (status)
        return status;
    pad::list_slots<<<pad::blocks_of(max_rows, 64), 64, 0, static_cast<cudaStream_t>(stream)>>>(
        rows, num_rows, int32_t(max_rows), length, int32_t(scratch), int32_t(ring), source, target);
    return pad::launch_status(name);
}

} // extern "C"
