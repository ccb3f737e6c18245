// Speculative sampling along one draft tree. Arguments as in pad.h, already checked.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pad {

// Rows of processed logits, and of the probabilities that children were drawn from (null: nothing was drawn).
struct RejectionRows {
    const float *logits;
    size_t vocab, row_stride;
    const float *q;
    size_t q_vocab, q_stride;
};

struct RejectionDraw {
    double temperature;
    uint64_t seed;
    uint32_t position, round;
};

// Writes the path; work [2 * width], width = max(vocab, q_vocab). Returns the token after the path, or -1 where its
// last row is not finite.
int32_t rejection_path(const RejectionRows &rows, const int32_t *token, const int32_t *parent, size_t n,
                       const RejectionDraw &draw, double *work, int32_t *path, int32_t *path_length);

} // namespace pad
