/* libpad on a GPU: the functions of pad.h on device memory. Only a library that was built with PAD_CUDA=ON has them.
 *
 * Pointers are to device memory unless said otherwise, with the shapes of pad.h. `stream` is a cudaStream_t of the
 * current device. A call launches kernels and returns: it allocates nothing and waits for nothing, so it can be
 * captured in a CUDA graph, and what a graph may change between replays lies in device memory. Only sizes and pointers
 * are checked; what the arrays hold is not, and a row that is not finite is marked in the outputs instead of reported.
 * Calls that use one workspace must be ordered by their stream.
 */
#ifndef PAD_CUDA_H
#define PAD_CUDA_H

#include "pad.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum pad_dtype {
    PAD_FLOAT32 = 0,
    PAD_BFLOAT16 = 1,
} pad_dtype;

/* Bytes that pad_cuda_row_stats and pad_cuda_gumbel_pick need at `workspace` (aligned to 16), for as many rows and ids.
 */
PAD_API size_t pad_cuda_workspace_size(size_t rows, size_t vocab);

/* pad_row_stats of logits of either type. Sums are fp32, so lse and entropy differ in their last bits. */
PAD_API pad_status pad_cuda_row_stats(const void *logits, pad_dtype dtype, size_t rows, size_t vocab, size_t row_stride,
                                      int32_t *top_id, float *top_logit, float *lse, float *entropy, float *margin,
                                      void *workspace, size_t workspace_size, void *stream);

/* pad_gumbel_pick, to the same ids: the noise is the same bit for bit. */
PAD_API pad_status pad_cuda_gumbel_pick(const float *logits, size_t rows, size_t vocab, size_t row_stride,
                                        const uint32_t *positions, uint64_t seed, float temperature, int32_t *out_id,
                                        void *workspace, size_t workspace_size, void *stream);

/* pad_gather_judged with logits of either type. */
PAD_API pad_status pad_cuda_gather_judged(const int32_t *row_top_id, const float *row_top_logit, const float *row_lse,
                                          const float *row_entropy, const void *logits, pad_dtype dtype, size_t vocab,
                                          size_t row_stride, const int32_t *token, const int32_t *parent, size_t n,
                                          int32_t *top_id, float *top_logit, float *lse, float *entropy,
                                          float *token_logit, void *stream);

/* pad_pivot_mlp with hidden states of either type. weights: in host memory, read during the call; it points to the
 * device.
 */
PAD_API pad_status pad_cuda_pivot_mlp(const pad_pivot_weights *weights, const void *hidden, pad_dtype dtype,
                                      size_t hidden_stride, const float *scalars, size_t n, float *pivot_prob,
                                      void *stream);

/* pad_relaxed_path in one block. rule [1]: in device memory, so that a replay sees changed thresholds. judged: in host
 * memory, read during the call; it points to the device (pivot_prob may be null only while no rule there asks for it).
 * Nothing is refused: the forest must be one that pad_relaxed_path takes; of path [n] the entries behind the last path
 * are -1. */
PAD_API pad_status pad_cuda_relaxed_path(const pad_rule *rule, const int32_t *token, const int32_t *parent,
                                         const int32_t *row_pick, const uint64_t *tree_mask_bits, const int32_t *depth,
                                         const int32_t *seq, const pad_judged *judged, size_t n, size_t num_roots,
                                         const uint64_t *history, uint64_t *kept, int32_t *path, int32_t *path_length,
                                         int32_t *end_token, uint8_t *overridden, void *stream);

/* pad_rejection_path along a chain: row i + 1 is the child of row i. token [n], the root's first.
 * position, round [1]: in device memory. end_token is -1 where a row on the path is not finite. Probabilities are
 * double, their sums in another order than on the CPU. */
PAD_API pad_status pad_cuda_rejection_path(const float *logits, size_t vocab, size_t row_stride, const float *q,
                                           size_t q_vocab, size_t q_stride, const int32_t *token, size_t n,
                                           double temperature, uint64_t seed, const uint32_t *position,
                                           const uint32_t *round, int32_t *path, int32_t *path_length,
                                           int32_t *end_token, void *stream);

/* pad_commit_list for num_rows [1] rows behind length [1] tokens, both in device memory, of at most max_rows.
 * rows [max_rows]. source, target [max_rows]: the entries behind the last are -1. */
PAD_API pad_status pad_cuda_commit_list(const int32_t *rows, const int32_t *num_rows, size_t max_rows,
                                        const int32_t *length, size_t scratch, size_t ring, int32_t *source,
                                        int32_t *target, void *stream);

#ifdef __cplusplus
}
#endif

#endif
