// Gumbel noise that is the same, bit for bit, wherever it is computed, and the pick by it. docs/sampling.md has the
// maths.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pad {

void gumbel(uint64_t seed, uint32_t position, uint32_t purpose, uint32_t round, uint32_t first_token, size_t n,
            float *out);

// Returns the first row that has no pick (its out_id is -1), or `rows` if there is none.
size_t gumbel_pick(const float *logits, size_t rows, size_t vocab, size_t row_stride, const uint32_t *positions,
                   uint64_t seed, float temperature, int32_t *out_id);

} // namespace pad
