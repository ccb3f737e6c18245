// Which slots of a key/value buffer a commit copies, and where to. Arguments as in pad.h, already checked.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pad {

void commit_list(const int32_t *rows, size_t num_rows, size_t length, size_t scratch, size_t ring, int32_t *source,
                 int32_t *target);

} // namespace pad
