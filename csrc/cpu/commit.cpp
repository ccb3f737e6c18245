#include "commit.h"

#include <algorithm>

namespace pad {

void commit_list(const int32_t *rows, size_t num_rows, size_t length, size_t scratch, size_t ring, int32_t *source,
                 int32_t *target) {
    const size_t moved = std::min(num_rows, ring);
    const size_t skipped = num_rows - moved;
    for (size_t i = 0; i < moved; ++i) {
        source[i] = int32_t(scratch - 1) - rows[skipped + i];
        target[i] = int32_t(scratch + (length + skipped + i) % ring);
    }
}

} // namespace pad
