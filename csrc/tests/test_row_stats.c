/* Row statistics against plain loops in double; ties, -inf, rows that are not finite; gathering; every refusal. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "pad.h"

enum { ROWS = 9, VOCAB = 301, STRIDE = 310 };

static float logits[ROWS * STRIDE];
static int32_t top_id[ROWS * 3];
static float top_logit[ROWS * 3], lse[ROWS], entropy[ROWS], margin[ROWS];

static pad_status stats(size_t rows, size_t vocab) {
    return pad_row_stats(logits, rows, vocab, STRIDE, top_id, top_logit, lse, entropy, margin);
}

/* the k-th in the order of logits, then ids: it has k tokens ahead of it */
static void check_order(const float *row, size_t r) {
    for (int k = 0; k < 3; ++k) {
        const int32_t id = top_id[3 * r + k];
        int ahead = 0;
        CHECK(id >= 0 && id < VOCAB && top_logit[3 * r + k] == row[id]);
        for (int t = 0; t < VOCAB; ++t)
            ahead += row[t] > row[id] || (row[t] == row[id] && t < id);
        CHECK(ahead == k);
    }
    CHECK(margin[r] == top_logit[3 * r] - top_logit[3 * r + 1]);
}

static void check_row(size_t r) {
    const float *row = logits + r * STRIDE;
    double total = 0.0, mean = 0.0;
    check_order(row, r);
    for (int t = 0; t < VOCAB; ++t)
        total += exp((double)row[t] - row[top_id[3 * r]]);
    const double exact = row[top_id[3 * r]] + log(total);
    for (int t = 0; t < VOCAB; ++t)
        if (isfinite(row[t]))
            mean += exp(row[t] - exact) * row[t];
    CHECK(fabs(lse[r] - exact) <= 1e-6 * fmax(1.0, fabs(exact)));
    CHECK(fabs(entropy[r] - (exact - mean)) <= 1e-5);
}

static void test_rows(void) {
    srand(3);
    for (size_t i = 0; i < ROWS * STRIDE; ++i)
        logits[i] = (float)(rand() % 4001) / 200.0f - 10.0f;
    for (int t = 0; t < VOCAB; ++t) {
        logits[1 * STRIDE + t] = (float)(t % 5);                     /* ties */
        logits[2 * STRIDE + t] = 2.0f;                               /* all alike */
        logits[3 * STRIDE + t] = t == 200 ? -7.0f : -INFINITY;       /* one possible token */
        logits[4 * STRIDE + t] *= 300.0f;                            /* exp would overflow */
        logits[5 * STRIDE + t] = rand() % 3 ? -INFINITY : -(float)t; /* a mask */
        logits[6 * STRIDE + t] = t % 2 ? 0.0f : -0.0f;               /* both zeros are equal */
    }
    CHECK(stats(ROWS, VOCAB) == PAD_OK);
    for (size_t r = 0; r < ROWS; ++r)
        check_row(r);
    CHECK(fabs(entropy[2] - log(VOCAB)) < 1e-6 && top_id[6] == 0 && top_id[7] == 1 && top_id[8] == 2);
    CHECK(entropy[3] == 0.0f && lse[3] == -7.0f && top_id[9] == 200 && top_id[10] == 0 && isinf(margin[3]));
    CHECK(top_id[18] == 0 && top_id[19] == 1);
    /* rows may overlap */
    CHECK(pad_row_stats(logits, 2, VOCAB, 0, top_id, top_logit, lse, entropy, margin) == PAD_OK && lse[0] == lse[1]);
}

static void test_nonfinite(void) {
    memset(logits, 0, sizeof logits);
    logits[1 * STRIDE + 300] = NAN;
    logits[2 * STRIDE] = -NAN;
    logits[3 * STRIDE + 7] = INFINITY;
    for (int t = 0; t < VOCAB; ++t)
        logits[4 * STRIDE + t] = -INFINITY;
    CHECK(stats(6, VOCAB) == PAD_ERROR_NONFINITE);
    CHECK(strstr(pad_last_error(), "row 1 ") != NULL);
    for (size_t r = 0; r < 6; ++r) {
        const int bad = r >= 1 && r <= 4;
        CHECK((lse[r] != lse[r]) == bad && (entropy[r] != entropy[r]) == bad && (margin[r] != margin[r]) == bad);
        CHECK((top_id[3 * r] < 0) == bad && (top_logit[3 * r + 2] != top_logit[3 * r + 2]) == bad);
    }
}

static void test_gather(void) {
    enum { N = 4 };
    const int32_t token[N] = {5, 300, VOCAB, -1}, parent[N] = {-1, 0, 1, 1};
    int32_t id[3 * N];
    float z[3 * N], l[N], h[N], logit[N];
    memset(logits, 0, sizeof logits);
    for (int r = 0; r < N; ++r)
        logits[r * STRIDE + 5 + r] = 3.0f;
    logits[300] = 1.5f;
    CHECK(stats(N, VOCAB) == PAD_OK);
    CHECK(pad_gather_judged(top_id, top_logit, lse, entropy, logits, VOCAB, STRIDE, token, parent, N, id, z, l, h,
                            logit) == PAD_OK);
    CHECK(id[0] == 5 && id[3] == 5 && id[6] == 6 && id[9] == 6);
    CHECK(logit[0] == 3.0f && logit[1] == 1.5f && logit[2] == -INFINITY && logit[3] == -INFINITY);
    CHECK(z[0] == 3.0f && l[1] == lse[0] && h[2] == entropy[1]);
}

static void test_refusals(void) {
    const int32_t token[2] = {0, 0}, parent[2] = {-1, 0}, bad_parent[2] = {-1, 1};
    CHECK(pad_row_stats(NULL, 0, 0, 0, NULL, NULL, NULL, NULL, NULL) == PAD_OK);
    CHECK(stats(1, 2) == PAD_ERROR_ARGUMENT && strstr(pad_last_error(), "vocab must be in [3") != NULL);
    CHECK(stats(1, (size_t)INT32_MAX + 1) == PAD_ERROR_ARGUMENT);
    for (int missing = 0; missing < 6; ++missing)
        CHECK(pad_row_stats(missing == 0 ? NULL : logits, 1, VOCAB, STRIDE, missing == 1 ? NULL : top_id,
                            missing == 2 ? NULL : top_logit, missing == 3 ? NULL : lse, missing == 4 ? NULL : entropy,
                            missing == 5 ? NULL : margin) == PAD_ERROR_ARGUMENT);
    for (int missing = 0; missing < 12; ++missing)
        CHECK(pad_gather_judged(missing == 0 ? NULL : top_id, missing == 1 ? NULL : top_logit,
                                missing == 2 ? NULL : lse, missing == 3 ? NULL : entropy, missing == 4 ? NULL : logits,
                                VOCAB, STRIDE, missing == 5 ? NULL : token, missing == 6 ? NULL : parent, 2,
                                missing == 7 ? NULL : top_id + 6, missing == 8 ? NULL : top_logit + 6,
                                missing == 9 ? NULL : lse + 2, missing == 10 ? NULL : entropy + 2,
                                missing == 11 ? NULL : margin) == PAD_ERROR_ARGUMENT);
    CHECK(pad_gather_judged(top_id, top_logit, lse, entropy, logits, VOCAB, STRIDE, token, bad_parent, 2, top_id + 6,
                            top_logit + 6, lse + 2, entropy + 2, margin) == PAD_ERROR_ARGUMENT);
    CHECK(pad_gather_judged(NULL, NULL, NULL, NULL, NULL, 0, 0, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL) == PAD_OK);
}

int main(void) {
    test_rows();
    test_nonfinite();
    test_gather();
    test_refusals();
    return failures != 0;
}
