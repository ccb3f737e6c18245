/* The vectors of docs/sampling.md; agreement with double precision; the pick against a plain loop. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "pad.h"

typedef struct {
    uint64_t seed;
    uint32_t position, token, purpose, round, bits;
} vector;

static const vector vectors[] = {
    {0x0, 0, 0, 0, 0, 0x3f2cc257},
    {0x0, 0, 1, 0, 0, 0x3f1dbf22},
    {0x0, 1, 0, 0, 0, 0xbfa36588},
    {0x2a, 0, 0, 0, 0, 0x3d556e80},
    {0x2a, 0, 49151, 0, 0, 0xbd4f9ea3},
    {0x2a, 4095, 262143, 0, 0, 0xbfad1985},
    {0x100000000, 0, 0, 0, 0, 0xbfc8779d},
    {0xffffffffffffffff, 4294967295u, 4294967295u, 3, 4294967295u, 0x3f9c737c},
    {0x123456789abcdef, 1000, 128000, 0, 0, 0x3fc70000},
    {0x7, 3, 5, 1, 9, 0xbf07262c},
    {0x7, 3, 5, 2, 9, 0xbf12d0fc},
    {0x7, 3, 5, 3, 9, 0x3ee404ee},
};

static void test_vectors(void) {
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors; ++i) {
        const vector *v = &vectors[i];
        float noise;
        uint32_t bits;
        CHECK(pad_gumbel(v->seed, v->position, v->purpose, v->round, v->token, 1, &noise) == PAD_OK);
        memcpy(&bits, &noise, sizeof bits);
        CHECK(bits == v->bits);
    }
}

/* the vectorised loop, its tail and any offset give each token the same number */
static void test_offsets(void) {
    enum { N = 300 };
    float all[N], part[N];
    CHECK(pad_gumbel(99, 5, PAD_PURPOSE_GUMBEL, 0, 0, N, all) == PAD_OK);
    for (uint32_t first = 0; first < N; first += 37) {
        CHECK(pad_gumbel(99, 5, PAD_PURPOSE_GUMBEL, 0, first, N - first, part) == PAD_OK);
        CHECK(memcmp(part, all + first, (N - first) * sizeof *part) == 0);
    }
}

static void test_against_double(void) {
    enum { N = 50000 };
    static float noise[N];
    const uint32_t key[2] = {3, 1};
    CHECK(pad_gumbel(3 | (uint64_t)1 << 32, 11, PAD_PURPOSE_DRAFT, 2, 0, N, noise) == PAD_OK);
    for (uint32_t token = 0; token < N; ++token) {
        const uint32_t counter[4] = {11, token, PAD_PURPOSE_DRAFT, 2};
        uint32_t word[4];
        CHECK(pad_philox4x32_10(counter, key, word) == PAD_OK);
        const double exact = -log(-log1p(-(word[0] + 0.5) / 4294967296.0));
        CHECK(fabs(noise[token] - exact) <= 1e-6 * fmax(1.0, fabs(exact)));
    }
}

static int32_t plain_pick(const float *logits, size_t vocab, uint32_t position, uint64_t seed, float temperature) {
    int32_t best = 0;
    float best_score = -INFINITY;
    for (size_t token = 0; token < vocab; ++token) {
        float noise;
        CHECK(pad_gumbel(seed, position, PAD_PURPOSE_GUMBEL, 0, (uint32_t)token, 1, &noise) == PAD_OK);
        const float product = temperature * noise;
        const float score = logits[token] + product;
        if (score > best_score) {
            best_score = score;
            best = (int32_t)token;
        }
    }
    return best;
}

static void test_pick(void) {
    enum { ROWS = 21, VOCAB = 523, STRIDE = 530 };
    static float logits[ROWS * STRIDE];
    uint32_t positions[ROWS];
    int32_t id[ROWS];
    srand(1);
    for (size_t i = 0; i < ROWS * STRIDE; ++i)
        logits[i] = (float)(rand() % 64) / 4.0f - 8.0f;
    for (uint32_t r = 0; r < ROWS; ++r)
        positions[r] = r < 12 ? 4 : r / 2; /* a run longer than a group, then pairs */
    const float temperatures[] = {0.0f, 1e-30f, 1e-8f, 0.7f, 1.0f, 50.0f};
    for (size_t i = 0; i < sizeof temperatures / sizeof *temperatures; ++i) {
        CHECK(pad_gumbel_pick(logits, ROWS, VOCAB, STRIDE, positions, 77, temperatures[i], id) == PAD_OK);
        for (size_t r = 0; r < ROWS; ++r)
            CHECK(id[r] == plain_pick(logits + r * STRIDE, VOCAB, positions[r], 77, temperatures[i]));
    }
}

static void test_nonfinite_rows(void) {
    enum { ROWS = 6, VOCAB = 300 };
    static float logits[ROWS * VOCAB];
    const uint32_t positions[ROWS] = {0, 0, 0, 0, 0, 0};
    int32_t id[ROWS];
    memset(logits, 0, sizeof logits);
    logits[0 * VOCAB + 299] = 1.0f;
    logits[1 * VOCAB + 290] = NAN;
    logits[2 * VOCAB + 3] = -NAN;
    logits[3 * VOCAB + 3] = INFINITY;
    for (size_t token = 0; token < VOCAB; ++token) {
        logits[4 * VOCAB + token] = -INFINITY;
        logits[5 * VOCAB + token] = token == 257 ? -3e38f : -INFINITY;
    }
    CHECK(pad_gumbel_pick(logits, ROWS, VOCAB, VOCAB, positions, 0, 1e-8f, id) == PAD_ERROR_NONFINITE);
    CHECK(strstr(pad_last_error(), "row 1 ") != NULL);
    CHECK(id[0] == 299 && id[1] == -1 && id[2] == -1 && id[3] == -1 && id[4] == -1 && id[5] == 257);
}

int main(void) {
    test_vectors();
    test_offsets();
    test_against_double();
    test_pick();
    test_nonfinite_rows();
    return failures != 0;
}
