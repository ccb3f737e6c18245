// Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as
// 1, 2, 3" (SC 2011): a bijection of the counter under the key, so any number can be drawn without those before it.
#pragma once

#include <cstdint>

#include "common/hd.h"

namespace pad {

struct PhiloxBlock {
    uint32_t word[4];
};

// A recursion, not a loop: the compiler vectorises the caller's loop over counters only when this one is straight code.
template <int rounds> PAD_HD PhiloxBlock philox4x32(PhiloxBlock counter, uint32_t key_low, uint32_t key_high) {
    const uint64_t product0 = uint64_t{0xD2511F53} * counter.word[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57} * counter.word[2];
    const PhiloxBlock next = {{
        uint32_t(product1 >> 32) ^ counter.word[1] ^ key_low,
        uint32_t(product1),
        uint32_t(product0 >> 32) ^ counter.word[3] ^ key_high,
        uint32_t(product0),
    }};
    if constexpr (rounds == 1) {
        return next;
    } else {
        // the key's Weyl increments: the golden ratio and sqrt(3) - 1
        return philox4x32<rounds - 1>(next, key_low + 0x9E3779B9, key_high + 0xBB67AE85);
    }
}

} // namespace pad
