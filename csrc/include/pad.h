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

#ifdef __cplusplus
}
#endif

#endif
