#include "philox.h"

#include "common/philox.h"

namespace pad {

void philox4x32_10(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]) {
    const PhiloxBlock block = philox4x32<10>({{counter[0], counter[1], counter[2], counter[3]}}, key[0], key[1]);
    for (int i = 0; i < 4; ++i)
        out[i] = block.word[i];
}

} // namespace pad
