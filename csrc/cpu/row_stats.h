// The few numbers of a row of logits, and of the row that judges a node. Arguments as in pad.h, already checked.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pad.h"

namespace pad {

// Outputs of pad_row_stats, or those that pad_gather_judged writes.
struct StatsOut {
    int32_t *top_id;
    float *top_logit, *lse, *entropy;
    float *margin;      // row_stats only
    float *token_logit; // gather_judged only
};

// Returns the first row that is not finite, or `rows` if there is none.
size_t row_stats(const float *logits, size_t rows, size_t vocab, size_t row_stride, const StatsOut &out);

// rows: the statistics of the rows, in the fields of the same names.
void gather_judged(const pad_judged &rows, const float *logits, size_t vocab, size_t row_stride, const int32_t *token,
                   const int32_t *parent, size_t n, const StatsOut &out);

} // namespace pad
