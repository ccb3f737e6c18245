/* libpad: the parts of speculative decoding that need no tensor library, behind a C ABI. A whole program that decodes
 * with it is examples/embed.c; pad_cuda.h has the same for device memory.
 *
 * Every function that can fail returns a pad_status; pad_last_error() then has one line of text for the calling thread.
 * All pointers belong to the caller and are used during the call only. Nothing here allocates, throws or keeps state
 * between calls, apart from that line of text. Every function may be called from any thread.
 *
 *     float noise[8];
 *     if (pad_gumbel(42, 0, PAD_PURPOSE_GUMBEL, 0, 0, 8, noise) != PAD_OK) fprintf(stderr, "%s\n", pad_last_error());
 *
 * Functions are added, never changed: PAD_ABI_VERSION grows only when an existing signature or meaning has to change.
 */
#ifndef PAD_H
#define PAD_H

#include <stddef.h>
#include <stdint.h>

#define PAD_ABI_VERSION 1

#if defined(PAD_BUILD)
#define PAD_API __attribute__((visibility("default")))
#else
#define PAD_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum pad_status {
    PAD_OK = 0,
    PAD_ERROR_ARGUMENT = 1,  /* a null pointer, a size or a value outside its range */
    PAD_ERROR_NONFINITE = 2, /* NaN or infinity where a finite number is needed */
    PAD_ERROR_CUDA = 3,      /* a kernel could not be launched (pad_cuda.h) */
} pad_status;

/* What a random number is for: the third word of the Philox counter (docs/sampling.md). */
typedef enum pad_purpose {
    PAD_PURPOSE_GUMBEL = 0,
    PAD_PURPOSE_ACCEPT = 1,
    PAD_PURPOSE_RESIDUAL = 2,
    PAD_PURPOSE_DRAFT = 3,
} pad_purpose;

/* PAD_ABI_VERSION of the library that is loaded, to compare with that of the header compiled against. */
PAD_API uint32_t pad_abi_version(void);

/* The release, such as "0.1.0". The text lives as long as the library. */
PAD_API const char *pad_version(void);

/* Why this thread's last failing call failed; "" before the first. Valid until the thread's next failing call. */
PAD_API const char *pad_last_error(void);

/* One block of Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3. SC 2011). */
PAD_API pad_status pad_philox4x32_10(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

/* Standard Gumbel noise of the token ids first_token .. first_token + n - 1 into out[n].
 * Counter (position, token id, purpose, round), key seed; the formula and its test vectors are in docs/sampling.md. */
PAD_API pad_status pad_gumbel(uint64_t seed, uint32_t position, uint32_t purpose, uint32_t round, uint32_t first_token,
                              size_t n, float *out);

/* For each row r: out_id[r] = argmax over token t of logits[r * row_stride + t] + temperature * gumbel(positions[r],
 * t), the lowest id at ties: one draw from softmax(logits / temperature). Temperature 0 is the plain argmax. -inf
 * logits are never picked. A row with a NaN, or whose best score is not finite, gets -1; the other rows are still
 * picked, and the call returns PAD_ERROR_NONFINITE and names the first such row.
 * Neighbouring rows with the same position share the noise, which is most of the work.
 * temperature is in [0, PAD_MAX_TEMPERATURE], vocab in [1, 2^31 - 1]. Rows may overlap: row_stride 0 repeats one row.
 */
#define PAD_MAX_TEMPERATURE 1e30f
PAD_API pad_status pad_gumbel_pick(const float *logits, size_t rows, size_t vocab, size_t row_stride,
                                   const uint32_t *positions, uint64_t seed, float temperature, int32_t *out_id);

/* The accepted path. A forest is n rows, each one node of a draft tree: the trees of several sequences behind one
 * another, parents before children. Arrays have one entry a row unless another size is given; n is at most 2^31 - 1.
 *
 *     token, parent, depth, seq    the node's token, its parent's row (-1 at a root), its number of ancestors, its
 *                                  sequence; a sequence has one root, and its rows lie side by side
 *     row_pick                     the target's own token after each node
 *     tree_mask_bits [n * W]       W = ceil(n / 64) words a row, bit j % 64 of word j / 64: row j is the node or an
 *                                  ancestor of it (signed words of the same bits will do)
 *
 * pad_accept_match or a rule of the caller's judges single nodes, pad_accept_bits leaves each node one child at most,
 * pad_accept_path reads off the paths; pad_match_path is the three in one call. Outputs may not overlap inputs, and
 * hold nothing of use after a failure.
 */

/* accept[i] = 1 where token[i] == row_pick[parent[i]] and at roots, else 0. */
PAD_API pad_status pad_accept_match(const int32_t *token, const int32_t *parent, const int32_t *row_pick, size_t n,
                                    uint8_t *accept);

/* Of each node's accepted children (accept[i] != 0) keep the one with the best score, then the lowest row; any number
 * beats NaN. Roots are kept whatever accept says. A null score means that all are equal.
 * kept [W]: the rows that are kept, as bits; the bits from n on are 0. */
PAD_API pad_status pad_accept_bits(const uint8_t *accept, const float *score, const int32_t *parent, size_t n,
                                   uint64_t *kept);

/* Node i is on its sequence's path iff tree_mask_bits[i] & ~kept == 0: it and all its ancestors are kept.
 * num_roots: rows of depth 0, which must all be kept; of other rows at most one child a node may be.
 * path [n]: the rows of the paths behind one another, sequences in the forest's order, roots first.
 * path_length [num_roots]: how many rows each sequence has of them, its root included. */
PAD_API pad_status pad_accept_path(const uint64_t *tree_mask_bits, const uint64_t *kept, const int32_t *depth,
                                   const int32_t *seq, size_t n, size_t num_roots, int32_t *path, int32_t *path_length);

/* Greedy and match acceptance of a whole forest: pad_accept_match, pad_accept_bits with equal scores (of equal
 * siblings the lowest row stays) and pad_accept_path.
 * kept [W], path [n], path_length [num_roots]: as above. end_token [num_roots]: row_pick after each path's last row. */
PAD_API pad_status pad_match_path(const int32_t *token, const int32_t *parent, const int32_t *row_pick,
                                  const uint64_t *tree_mask_bits, const int32_t *depth, const int32_t *seq, size_t n,
                                  size_t num_roots, uint64_t *kept, int32_t *path, int32_t *path_length,
                                  int32_t *end_token);

/* Which slots of a key/value buffer to copy so that the rows of one sequence join its committed prefix. Scratch row r
 * lives in slot scratch - 1 - r, and position p of the prefix in slot scratch + p % ring; so no source is a target.
 * rows [num_rows]: scratch rows, each below `scratch`, to become the positions length, length + 1, and so on.
 * ring: the window of a sliding layer, of whose rows only the last `ring` are kept; the capacity of any other layer,
 * where it is for the caller to see that length + num_rows does not exceed it.
 * source, target [min(num_rows, ring)]: copy the first to the second, entry by entry.
 * length + num_rows and scratch + ring are at most 2^31 - 1. */
PAD_API pad_status pad_commit_list(const int32_t *rows, size_t num_rows, size_t length, size_t scratch, size_t ring,
                                   int32_t *source, int32_t *target);

/* Relaxed acceptance: from raw logits to the tokens that a lossy rule lets pass, in the order of the calls.
 *
 *     pad_row_stats        logits -> a few numbers a row
 *     pad_gather_judged    those -> a few numbers a node, taken from its parent's row, which is the one that judges it
 *     pad_pivot_mlp        hidden states -> pivot_prob a node (or pad_linear_judge), for the rules that ask for it
 *     pad_relaxed_path     rule and numbers -> the path of each sequence
 *
 * Logits are raw here, at temperature 1. pad_gumbel_pick gives row_pick, from processed logits where there are any. */

/* Statistics of each row of fp32 logits; row r is logits[r * row_stride .. + vocab), with vocab in [3, 2^31 - 1].
 * top_id, top_logit [rows * 3]: the three largest, largest first, the lowest id first at ties.
 * lse, entropy, margin [rows]: log(sum(exp(z))); lse - sum(exp(z - lse) z) in nats, where -inf adds nothing; the
 * largest logit minus the second. A row with a NaN or +inf, or without a finite logit, gets NaN in every number and -1
 * in its ids; the other rows are still done, and the call returns PAD_ERROR_NONFINITE and names the first such row. */
PAD_API pad_status pad_row_stats(const float *logits, size_t rows, size_t vocab, size_t row_stride, int32_t *top_id,
                                 float *top_logit, float *lse, float *entropy, float *margin);

/* What the row that judges a node says, one entry a node. pivot_prob may be null for all kinds but PAD_RULE_PIVOT. */
typedef struct pad_judged {
    const int32_t *top_id;    /* [n * 3] as of pad_row_stats */
    const float *top_logit;   /* [n * 3] */
    const float *lse;         /* [n] */
    const float *entropy;     /* [n] */
    const float *token_logit; /* [n] the logit of the node's token */
    const float *pivot_prob;  /* [n] how likely the node is one that must not be wrong */
} pad_judged;

/* Statistics of rows to those of nodes: node i takes them from row parent[i], a root from its own. row_* are outputs of
 * pad_row_stats on the same n rows of logits. The logit of a token outside [0, vocab) is -inf.
 * top_id, top_logit [n * 3], lse, entropy, token_logit [n]: written, to be pointed at by a pad_judged. */
PAD_API pad_status pad_gather_judged(const int32_t *row_top_id, const float *row_top_logit, const float *row_lse,
                                     const float *row_entropy, const float *logits, size_t vocab, size_t row_stride,
                                     const int32_t *token, const int32_t *parent, size_t n, int32_t *top_id,
                                     float *top_logit, float *lse, float *entropy, float *token_logit);

/* The pivot classifier of PAD (Reject only critical tokens, arXiv 2511.00351), fp32, matrices by rows:
 *     t = W_h h + b_h [64]    s = W_s x + b_s [16]    z = relu(W_1 [t; s] + b_1) [128]    pivot_prob = softmax(W_2 z +
 * b_2)[1] The names are those of the tensors in a checkpoint. */
typedef struct pad_pivot_weights {
    uint32_t hidden_size;        /* d, at least 1 */
    uint32_t num_scalars;        /* S, may be 0 */
    const float *hidden_weight;  /* [64 * d] */
    const float *hidden_bias;    /* [64] */
    const float *scalars_weight; /* [16 * S], null when S is 0 */
    const float *scalars_bias;   /* [16] */
    const float *layer1_weight;  /* [128 * 80] */
    const float *layer1_bias;    /* [128] */
    const float *layer2_weight;  /* [2 * 128] */
    const float *layer2_bias;    /* [2] */
} pad_pivot_weights;

/* hidden: node i's own hidden state at hidden[i * hidden_stride .. + d). scalars [n * S]: in the checkpoint's order
 * (null when S is 0). pivot_prob [n]. A NaN or an infinity gives a NaN or a probability, and no error: no rule lets NaN
 * pass. */
PAD_API pad_status pad_pivot_mlp(const pad_pivot_weights *weights, const float *hidden, size_t hidden_stride,
                                 const float *scalars, size_t n, float *pivot_prob);

/* The linear head of judge decoding (arXiv 2501.19309) as such a probability: pivot_prob[i] = 1 - sigmoid(weight . h_i
 * + bias). weight [hidden_size]; hidden and pivot_prob as above. */
PAD_API pad_status pad_linear_judge(const float *weight, float bias, const float *hidden, size_t hidden_size,
                                    size_t hidden_stride, size_t n, float *pivot_prob);

/* When a token that is not the target's own passes all the same. z1 >= z2: the largest logits of the judging row; p1,
 * p2: their probabilities; p: the token's; H: the row's entropy; t0, t1: thresholds. */
typedef enum pad_rule_kind {
    PAD_RULE_BASE = 0,         /* never: pad_match_path */
    PAD_RULE_MARGIN_PAPER = 1, /* token is second, z1 > 0 and z2 > t0 z1: MARS (arXiv 2601.15498), t0 = theta */
    PAD_RULE_MARGIN_RATIO = 2, /* token is second and z2 - z1 > t0, that is p2 / p1 > rho; t0 = ln rho */
    PAD_RULE_MARGIN_GAP = 3,   /* token is second and p1 - p2 < t0 */
    PAD_RULE_PIVOT = 4,        /* t0 > 0 and pivot_prob <= t0: PAD, t0 = sigma; a judge, t0 = 1 - delta */
    PAD_RULE_TYPICAL = 5,   /* ln p > t0 or ln p + H > t1: Medusa (arXiv 2401.10774), t0 = ln epsilon, t1 = ln delta */
    PAD_RULE_TOPK = 6,      /* token is among the first t0 of top_id; t0 is 1, 2 or 3 */
    PAD_RULE_FLY_PAPER = 7, /* H >= t0: FLy (arXiv 2511.22972), t0 = theta ln(vocab); with lookahead */
    PAD_RULE_FLY_RELEASED = 8, /* -sum over the three largest of p ln p >= t0; with lookahead and reach */
} pad_rule_kind;

/* A rule: its kind, and what bounds it. Start from zeros with log_floor = -INFINITY: then nothing bounds it.
 * base: the node's token is row_pick of its parent. override: as the kind says. floor: ln p >= log_floor.
 * accept = base or (override and floor); with outer_floor (base or override) and floor. */
typedef struct pad_rule {
    uint32_t kind;          /* a pad_rule_kind */
    float threshold[4];     /* t0, t1, ..: those that the kind does not use are not read */
    float log_floor;        /* ln of the least probability, -inf for none */
    uint32_t outer_floor;   /* whether the floor holds for the base as well: 0 or 1 */
    uint32_t lookahead;     /* an override needs so many nodes of base behind it on the path; 0: none */
    uint32_t reach;         /* an override at depth d needs d + reach <= the depth of its subtree; 0: none */
    uint32_t max_overrides; /* at most so many overrides among the last `window` emitted tokens; 0: no such bound */
    uint32_t window;        /* in [1, 64] when max_overrides is not 0 */
} pad_rule;

/* The accepted path under a rule, for forests of at most 64 rows (so W = 1).
 * 1. Nodes are judged. A node whose parent has row_pick -1 is not accepted.
 * 2. Of a node's accepted children the best score stays, then the lowest row, as in pad_accept_bits. The score is 2
 * where base, else 1 - pivot_prob for PAD_RULE_PIVOT, else the token's probability.
 * 3. Each path is cut in front of its first override that has not enough behind it (lookahead, reach) or that is one
 * too many (max_overrides). A node's subtree is read from tree_mask_bits and depth. history [num_roots]: bit b says
 * that the token emitted b tokens before the next one was an override; null: none was. pad_override_history gives the
 * next one. kept [1]: the children that stay, before the cut. path [n], path_length, end_token [num_roots]: as of
 * pad_match_path, behind the cut. overridden [n]: 1 where a row on a path is there by an override, else 0.
 * Probabilities are exp of an fp32 difference, rounded once from double precision; all else is plain fp32. */
PAD_API pad_status pad_relaxed_path(const pad_rule *rule, const int32_t *token, const int32_t *parent,
                                    const int32_t *row_pick, const uint64_t *tree_mask_bits, const int32_t *depth,
                                    const int32_t *seq, const pad_judged *judged, size_t n, size_t num_roots,
                                    const uint64_t *history, uint64_t *kept, int32_t *path, int32_t *path_length,
                                    int32_t *end_token, uint8_t *overridden);

/* The history behind `emitted` more tokens: (history << emitted) | bits, without what falls out at the top. bits: which
 * of them were overrides, the newest in bit 0 (the token after a path never is one); bits from `emitted` on count not.
 */
PAD_API uint64_t pad_override_history(uint64_t history, size_t emitted, uint64_t bits);

/* Speculative sampling (Leviathan et al. 2023, algorithm 1), on trees by recursive rejection, for one sequence: the
 * output is distributed as the target's. Siblings are tried by their rows. A token x drawn from q stays when u q(x) <
 * p(x), u of purpose PAD_PURPOSE_ACCEPT; else p becomes norm(max(p - q, 0)), and q loses x. Where no child stays, the
 * next token is the argmax of ln p + Gumbel noise of purpose PAD_PURPOSE_RESIDUAL. In double precision throughout.
 * logits: the target's processed logits, row i after node i at logits[i * row_stride .. + vocab); p = softmax(logits /
 * temperature), at temperature 0 all of it on the first largest logit. temperature is in [0, PAD_MAX_TEMPERATURE].
 * q: at q[i * q_stride .. + q_vocab) the probabilities that the children of node i were drawn from, without
 * replacement; null: nothing was drawn, and q is 1 at each token. An id that only p or only q knows is impossible for
 * the other. token, parent [n]: row 0 is the root, with parent -1, and no other row has that; the root's token is not
 * read. seed, round: of the request, and its round's index. position: that of the token after the root. work [2 *
 * max(vocab, q_vocab)]: scratch of the caller; q_vocab counts as 0 without q. path [n]: the rows kept, root first.
 * path_length, end_token [1]: how many they are, and the token after them. A row on the path that has a NaN or +inf, or
 * no finite logit, ends it with end_token -1 and PAD_ERROR_NONFINITE. */
PAD_API pad_status pad_rejection_path(const float *logits, size_t vocab, size_t row_stride, const float *q,
                                      size_t q_vocab, size_t q_stride, const int32_t *token, const int32_t *parent,
                                      size_t n, double temperature, uint64_t seed, uint32_t position, uint32_t round,
                                      double *work, int32_t *path, int32_t *path_length, int32_t *end_token);

#ifdef __cplusplus
}
#endif

#endif
