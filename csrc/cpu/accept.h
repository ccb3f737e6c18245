// From judgements of single nodes to the accepted path of each sequence. Arguments as in pad.h, already checked.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pad {

void accept_match(const int32_t *token, const int32_t *parent, const int32_t *row_pick, size_t n, uint8_t *accept);

// score may be null: all equal.
void accept_bits(const uint8_t *accept, const float *score, const int32_t *parent, size_t n, uint64_t *kept);

// accept_match and accept_bits at once, without the bytes between them.
void match_bits(const int32_t *token, const int32_t *parent, const int32_t *row_pick, size_t n, uint64_t *kept);

// Returns the first row that fits no path, or n: a root that is not kept, a second row of one depth, or a sequence
// that has no root of its own or does not lie side by side.
size_t accept_path(const uint64_t *tree_mask_bits, const uint64_t *kept, const int32_t *depth, const int32_t *seq,
                   size_t n, int32_t *path, int32_t *path_length);

} // namespace pad
