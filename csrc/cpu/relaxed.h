// The accepted path under a rule. Arguments as in pad.h, already checked.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pad.h"

namespace pad {

struct ForestRows {
    const int32_t *token, *parent, *row_pick;
    const uint64_t *tree_mask_bits;
    const int32_t *depth, *seq;
    size_t n, num_roots;
};

// Returns the first row that fits no path, as accept_path does, or n.
size_t relaxed_path(const pad_rule &rule, const ForestRows &forest, const pad_judged &judged, const uint64_t *history,
                    uint64_t *kept, int32_t *path, int32_t *path_length, int32_t *end_token, uint8_t *overridden);

} // namespace pad
