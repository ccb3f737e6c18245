/* libpad: the parts of speculative decoding that need no tensor library, behind a C ABI.
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

#ifdef __cplusplus
}
#endif

#endif
