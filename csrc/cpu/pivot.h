// Classifiers of single nodes. Arguments as in pad.h, already checked.
#pragma once

#include <cstddef>

#include "pad.h"

namespace pad {

void pivot_mlp(const pad_pivot_weights &weights, const float *hidden, size_t hidden_stride, const float *scalars,
               size_t n, float *pivot_prob);

void linear_judge(const float *weight, float bias, const float *hidden, size_t hidden_size, size_t hidden_stride,
                  size_t n, float *pivot_prob);

} // namespace pad
