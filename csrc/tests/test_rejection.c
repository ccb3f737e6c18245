/* Speculative sampling: its law by counting, certain cases, rows that are not finite, other vocabularies, refusals.
 * That it draws what the Python rule draws is tests/test_native_tail.py. */
#include <math.h>
#include <string.h>

#include "check.h"
#include "pad.h"

enum { N = 3, V = 4, ROUNDS = 40000 };

static const int32_t chain[N] = {-1, 0, 1}, star[N] = {-1, 0, 0};
static double work[2 * 8];
static int32_t path[N], length, end;

static pad_status run(const float *logits, const float *q, size_t q_vocab, const int32_t *token, const int32_t *parent,
                      double temperature, uint64_t seed) {
    return pad_rejection_path(logits, V, V, q, q_vocab, q_vocab, token, parent, N, temperature, seed, 17, 3, work, path,
                              &length, &end);
}

/* the first token's law, drafted by a drafter that draws from q with its own randomness: within five deviations */
static void test_law(void) {
    const double p[V] = {0.5, 0.3, 0.15, 0.05};
    const float q[V] = {0.2f, 0.2f, 0.5f, 0.1f};
    float logits[N * V], rows[N * V];
    double count[V] = {0, 0, 0, 0};
    for (size_t i = 0; i < N * V; ++i) {
        logits[i] = (float)log(p[i % V]);
        rows[i] = q[i % V];
    }
    for (int drawn = 0; drawn < 2; ++drawn) {
        memset(count, 0, sizeof count);
        for (uint64_t seed = 0; seed < ROUNDS; ++seed) {
            int32_t token[N] = {0, 2, 1};
            for (int i = 1; drawn && i < N; ++i) {
                /* without replacement, as the rule is told */
                float best = -INFINITY;
                const int32_t taken = i == 2 ? token[1] : -1;
                for (uint32_t t = 0; t < V; ++t) {
                    float noise;
                    CHECK(pad_gumbel(seed, (uint32_t)i, PAD_PURPOSE_DRAFT, 3, t, 1, &noise) == PAD_OK);
                    if ((int32_t)t != taken && logf(q[t]) + noise > best) {
                        best = logf(q[t]) + noise;
                        token[i] = (int32_t)t;
                    }
                }
            }
            CHECK(run(logits, drawn ? rows : NULL, V, token, star, 1.0, seed) == PAD_OK);
            count[length > 1 ? token[path[1]] : end] += 1.0;
        }
        for (size_t t = 0; t < V; ++t)
            CHECK(fabs(count[t] / ROUNDS - p[t]) < 5.0 * sqrt(p[t] * (1.0 - p[t]) / ROUNDS));
    }
}

static void test_temperature_0(void) {
    const float logits[N * V] = {0, 3, 3, 1, 5, 1, 1, 1, 0, 0, 2, 0};
    const int32_t right[N] = {0, 1, 0}, wrong[N] = {0, 2, 0};
    CHECK(run(logits, NULL, 0, right, chain, 0.0, 1) == PAD_OK && length == 3 && path[2] == 2 && end == 2);
    CHECK(run(logits, NULL, 0, wrong, chain, 0.0, 1) == PAD_OK && length == 1 && end == 1);
    CHECK(run(logits, NULL, 0, right, star, 0.0, 1) == PAD_OK && length == 2 && path[1] == 1 && end == 0);
    /* as cold as it gets without being 0 */
    CHECK(run(logits, NULL, 0, right, star, 1e-300, 1) == PAD_OK && length <= 2);
}

static void test_nonfinite(void) {
    float logits[N * V] = {0, 0, 0, 0, NAN, 0, 0, 0, 0, 0, 0, 0};
    const int32_t token[N] = {0, 1, 2};
    logits[1] = 100.0f;
    CHECK(run(logits, NULL, 0, token, chain, 1.0, 1) == PAD_ERROR_NONFINITE);
    CHECK(length == 2 && path[0] == 0 && path[1] == 1 && end == -1 && strstr(pad_last_error(), "row 1 ") != NULL);
    logits[1] = INFINITY;
    CHECK(run(logits, NULL, 0, token, chain, 1.0, 1) == PAD_ERROR_NONFINITE && length == 1);
    for (size_t t = 0; t < V; ++t)
        logits[t] = -INFINITY;
    CHECK(run(logits, NULL, 0, token, chain, 0.0, 1) == PAD_ERROR_NONFINITE && length == 1);
    /* off the path it does not matter */
    logits[0] = 1.0f;
    CHECK(run(logits, NULL, 0, token, chain, 1.0, 1) == PAD_OK && length == 1 && end == 0);
}

/* q of more or fewer ids, tokens outside of either, empty and broken q: always a token of the target's support */
static void test_other_vocabularies(void) {
    const float logits[N * V] = {0, 1, -INFINITY, 0, 0, 1, -INFINITY, 0, 0, 1, -INFINITY, 0};
    const int32_t tokens[][N] = {{0, 1, 3}, {0, 7, 1}, {0, 2, 2}, {0, INT32_MAX, 5}, {0, 0, 0}};
    float q[N * 8];
    for (int kind = 0; kind < 4; ++kind) {
        for (size_t i = 0; i < N * 8; ++i)
            q[i] = kind == 0 ? 0.125f : kind == 1 ? 0.0f : kind == 2 ? NAN : (float)(i % 8 == 2);
        for (size_t i = 0; i < sizeof tokens / sizeof *tokens; ++i)
            for (uint64_t seed = 0; seed < 50; ++seed)
                for (size_t q_vocab = 2; q_vocab <= 8; q_vocab += 2) {
                    const int32_t *parent = seed % 2 ? chain : star;
                    CHECK(run(logits, q, q_vocab, tokens[i], parent, 1.0, seed) == PAD_OK);
                    CHECK(end >= 0 && end < V && end != 2);
                    for (int32_t d = 1; d < length; ++d)
                        CHECK(tokens[i][path[d]] < V && tokens[i][path[d]] != 2);
                }
    }
}

static void test_refusals(void) {
    const float logits[N * V] = {0};
    const int32_t token[N] = {-5, 1, 2}, negative[N] = {0, 1, -1}, two_roots[N] = {-1, 0, -1}, late[N] = {-1, 2, 0};
    CHECK(run(logits, NULL, 0, token, chain, 1.0, 1) == PAD_OK); /* the root's token is not read */
    CHECK(run(logits, NULL, 0, negative, chain, 1.0, 1) == PAD_ERROR_ARGUMENT);
    CHECK(run(logits, NULL, 0, token, two_roots, 1.0, 1) == PAD_ERROR_ARGUMENT);
    CHECK(strstr(pad_last_error(), "second root") != NULL);
    CHECK(run(logits, NULL, 0, token, late, 1.0, 1) == PAD_ERROR_ARGUMENT);
    CHECK(run(logits, logits, 0, token, chain, 1.0, 1) == PAD_ERROR_ARGUMENT);
    const double bad[] = {-1.0, NAN, INFINITY, 1.1e30};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; ++i)
        CHECK(run(logits, NULL, 0, token, chain, bad[i], 1) == PAD_ERROR_ARGUMENT);
    CHECK(pad_rejection_path(logits, 0, V, NULL, 0, 0, token, chain, N, 1.0, 0, 0, 0, work, path, &length, &end) ==
          PAD_ERROR_ARGUMENT);
    CHECK(pad_rejection_path(logits, V, V, NULL, 0, 0, token, chain, 0, 1.0, 0, 0, 0, work, path, &length, &end) ==
          PAD_ERROR_ARGUMENT);
    for (int missing = 0; missing < 7; ++missing)
        CHECK(pad_rejection_path(missing == 0 ? NULL : logits, V, V, NULL, 0, 0, missing == 1 ? NULL : token,
                                 missing == 2 ? NULL : chain, N, 1.0, 0, 0, 0, missing == 3 ? NULL : work,
                                 missing == 4 ? NULL : path, missing == 5 ? NULL : &length,
                                 missing == 6 ? NULL : &end) == PAD_ERROR_ARGUMENT);
}

int main(void) {
    test_law();
    test_temperature_0();
    test_nonfinite();
    test_other_vocabularies();
    test_refusals();
    return failures != 0;
}
