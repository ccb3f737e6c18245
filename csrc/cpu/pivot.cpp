#include "pivot.h"

#include <algorithm>

#include "common/pivot.h"
#include "simd.h"

namespace pad {
namespace {

constexpr size_t LANES = 16;

// A fixed number of running sums, whatever the vectors: the same bits from every clone.
PAD_INLINE float dot(const float *__restrict a, const float *__restrict b, size_t n) {
    float lane[LANES] = {};
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (size_t k = 0; k < LANES; ++k)
            lane[k] += a[i + k] * b[i + k];
    for (size_t k = 0; i < n; ++i, ++k)
        lane[k] += a[i] * b[i];
    for (size_t width = LANES / 2; width > 0; width /= 2)
        for (size_t k = 0; k < width; ++k)
            lane[k] += lane[k + width];
    return lane[0];
}

// out[u] = weight[u] . x + bias[u]
PAD_INLINE void linear(const float *weight, const float *bias, const float *x, size_t size, size_t units, float *out) {
    for (size_t u = 0; u < units; ++u)
        out[u] = dot(weight + u * size, x, size) + bias[u];
}

} // namespace

PAD_VECTOR_CLONES void pivot_mlp(const pad_pivot_weights &weights, const float *hidden, size_t hidden_stride,
                                 const float *scalars, size_t n, float *pivot_prob) {
    const size_t d = weights.hidden_size, num_scalars = weights.num_scalars;
    float first[FIRST_UNITS], second[SECOND_UNITS], out[2];
    for (size_t i = 0; i < n; ++i) {
        linear(weights.hidden_weight, weights.hidden_bias, hidden + i * hidden_stride, d, HIDDEN_UNITS, first);
        float *behind = first + HIDDEN_UNITS;
        if (num_scalars > 0)
            linear(weights.scalars_weight, weights.scalars_bias, scalars + i * num_scalars, num_scalars, SCALAR_UNITS,
                   behind);
        else
            std::copy_n(weights.scalars_bias, size_t{SCALAR_UNITS}, behind);
        linear(weights.layer1_weight, weights.layer1_bias, first, FIRST_UNITS, SECOND_UNITS, second);
        for (float &x : second)
            // this way round a NaN stays one
            x = x < 0.0f ? 0.0f : x;
        linear(weights.layer2_weight, weights.layer2_bias, second, SECOND_UNITS, 2, out);
        pivot_prob[i] = sigmoid(out[1] - out[0]);
    }
}

PAD_VECTOR_CLONES void linear_judge(const float *weight, float bias, const float *hidden, size_t hidden_size,
                                    size_t hidden_stride, size_t n, float *pivot_prob) {
    for (size_t i = 0; i < n; ++i)
        pivot_prob[i] = sigmoid(-(dot(weight, hidden + i * hidden_stride, hidden_size) + bias));
}

} // namespace pad
