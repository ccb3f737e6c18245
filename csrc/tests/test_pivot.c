/* The classifiers against plain loops in double; extremes; every refusal. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "pad.h"

enum { N = 5, D = 37, STRIDE = 40, S = 3 };

static float hidden_weight[64 * D], hidden_bias[64], scalars_weight[16 * S], scalars_bias[16], layer1_weight[128 * 80],
    layer1_bias[128], layer2_weight[2 * 128], layer2_bias[2], hidden[N * STRIDE], scalars[N * S];

static const pad_pivot_weights weights = {
    D,          S, hidden_weight, hidden_bias, scalars_weight, scalars_bias, layer1_weight, layer1_bias, layer2_weight,
    layer2_bias};

static void fill(float *x, size_t n, float scale) {
    for (size_t i = 0; i < n; ++i)
        x[i] = scale * ((float)(rand() % 2001) / 1000.0f - 1.0f);
}

static double plain(size_t node, size_t num_scalars) {
    double first[80], out[2] = {layer2_bias[0], layer2_bias[1]};
    for (size_t u = 0; u < 64; ++u) {
        first[u] = hidden_bias[u];
        for (size_t k = 0; k < D; ++k)
            first[u] += (double)hidden_weight[u * D + k] * hidden[node * STRIDE + k];
    }
    for (size_t u = 0; u < 16; ++u) {
        first[64 + u] = scalars_bias[u];
        for (size_t k = 0; k < num_scalars; ++k)
            first[64 + u] += (double)scalars_weight[u * S + k] * scalars[node * S + k];
    }
    for (size_t v = 0; v < 128; ++v) {
        double z = layer1_bias[v];
        for (size_t u = 0; u < 80; ++u)
            z += layer1_weight[v * 80 + u] * first[u];
        for (size_t k = 0; k < 2; ++k)
            out[k] += layer2_weight[k * 128 + v] * fmax(z, 0.0);
    }
    return 1.0 / (1.0 + exp(out[0] - out[1]));
}

static void test_mlp(void) {
    float prob[N];
    srand(5);
    fill(hidden_weight, 64 * D, 0.3f), fill(hidden_bias, 64, 0.3f), fill(scalars_weight, 16 * S, 1.0f);
    fill(scalars_bias, 16, 0.3f), fill(layer1_weight, 128 * 80, 0.2f), fill(layer1_bias, 128, 0.2f);
    fill(layer2_weight, 2 * 128, 0.3f), fill(layer2_bias, 2, 1.0f), fill(hidden, N * STRIDE, 2.0f);
    fill(scalars, N * S, 2.0f);
    CHECK(pad_pivot_mlp(&weights, hidden, STRIDE, scalars, N, prob) == PAD_OK);
    for (size_t i = 0; i < N; ++i)
        CHECK(fabs(prob[i] - plain(i, S)) < 1e-5);
    pad_pivot_weights bare = weights;
    bare.num_scalars = 0;
    bare.scalars_weight = NULL;
    CHECK(pad_pivot_mlp(&bare, hidden, STRIDE, NULL, N, prob) == PAD_OK);
    for (size_t i = 0; i < N; ++i)
        CHECK(fabs(prob[i] - plain(i, 0)) < 1e-5);
}

static void test_extremes(void) {
    float prob[2], far[2 * D];
    const float old = layer2_bias[0];
    layer2_bias[0] = 1e30f;
    CHECK(pad_pivot_mlp(&weights, hidden, STRIDE, scalars, 1, prob) == PAD_OK && prob[0] == 0.0f);
    layer2_bias[0] = -1e30f;
    CHECK(pad_pivot_mlp(&weights, hidden, STRIDE, scalars, 1, prob) == PAD_OK && prob[0] == 1.0f);
    layer2_bias[0] = old;
    memset(far, 0, sizeof far);
    far[3] = NAN;
    CHECK(pad_pivot_mlp(&weights, far, D, scalars, 2, prob) == PAD_OK);
    CHECK(isnan(prob[0]) && !isnan(prob[1]));
}

static void test_judge(void) {
    float prob[N];
    CHECK(pad_linear_judge(hidden_weight, 0.25f, hidden, D, STRIDE, N, prob) == PAD_OK);
    for (size_t i = 0; i < N; ++i) {
        double x = 0.25;
        for (size_t k = 0; k < D; ++k)
            x += (double)hidden_weight[k] * hidden[i * STRIDE + k];
        CHECK(fabs(prob[i] - (1.0 - 1.0 / (1.0 + exp(-x)))) < 1e-6);
    }
    CHECK(pad_linear_judge(hidden_weight, 1e30f, hidden, D, STRIDE, 1, prob) == PAD_OK && prob[0] == 0.0f);
    CHECK(pad_linear_judge(hidden_weight, -1e30f, hidden, D, STRIDE, 1, prob) == PAD_OK && prob[0] == 1.0f);
}

static void test_refusals(void) {
    float prob[N];
    CHECK(pad_pivot_mlp(NULL, NULL, 0, NULL, 0, NULL) == PAD_OK);
    CHECK(pad_linear_judge(NULL, 0.0f, NULL, 0, 0, 0, NULL) == PAD_OK);
    CHECK(pad_pivot_mlp(NULL, hidden, STRIDE, scalars, N, prob) == PAD_ERROR_ARGUMENT);
    CHECK(pad_pivot_mlp(&weights, NULL, STRIDE, scalars, N, prob) == PAD_ERROR_ARGUMENT);
    CHECK(pad_pivot_mlp(&weights, hidden, STRIDE, NULL, N, prob) == PAD_ERROR_ARGUMENT);
    CHECK(pad_pivot_mlp(&weights, hidden, STRIDE, scalars, N, NULL) == PAD_ERROR_ARGUMENT);
    for (int missing = 0; missing < 9; ++missing) {
        pad_pivot_weights w = weights;
        if (missing == 0)
            w.hidden_size = 0;
        const float **pointers[8] = {&w.hidden_weight, &w.hidden_bias, &w.scalars_weight, &w.scalars_bias,
                                     &w.layer1_weight, &w.layer1_bias, &w.layer2_weight,  &w.layer2_bias};
        if (missing > 0)
            *pointers[missing - 1] = NULL;
        CHECK(pad_pivot_mlp(&w, hidden, STRIDE, scalars, N, prob) == PAD_ERROR_ARGUMENT);
    }
    CHECK(pad_linear_judge(NULL, 0.0f, hidden, D, STRIDE, N, prob) == PAD_ERROR_ARGUMENT);
    CHECK(pad_linear_judge(hidden_weight, 0.0f, NULL, D, STRIDE, N, prob) == PAD_ERROR_ARGUMENT);
    CHECK(pad_linear_judge(hidden_weight, 0.0f, hidden, D, STRIDE, N, NULL) == PAD_ERROR_ARGUMENT);
    CHECK(pad_linear_judge(hidden_weight, 0.0f, hidden, 0, STRIDE, N, prob) == PAD_ERROR_ARGUMENT);
    CHECK(strstr(pad_last_error(), "hidden_size") != NULL);
}

int main(void) {
    test_mlp();
    test_extremes();
    test_judge();
    test_refusals();
    return failures != 0;
}
