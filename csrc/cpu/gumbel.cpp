#include "gumbel.h"

#include <algorithm>
#include <cfloat>
#include <climits>

#include "common/noise.h"
#include "pad.h"
#include "simd.h"

static_assert(FLT_EVAL_METHOD == 0, "each fp32 operation must round to fp32");

namespace pad {
namespace {

constexpr size_t TILE = 256; // tokens whose noise is kept on the stack
constexpr size_t GROUP = 8;  // rows that share one tile of noise

PAD_INLINE void noise(uint64_t seed, uint32_t position, uint32_t purpose, uint32_t round, uint32_t first, size_t n,
                      float *__restrict out) {
    for (size_t i = 0; i < n; ++i)
        out[i] = gumbel_of(word_of(seed, position, first + uint32_t(i), purpose, round));
}

struct Best {
    int32_t key = INT_MIN;
    int32_t id = -1;
    int32_t has_nan = 0;
};

PAD_INLINE void update(Best &best, const float *__restrict logits, const float *__restrict noise, float temperature,
                       size_t first, size_t n) {
    int32_t keys[TILE];
    int32_t top = INT_MIN, has_nan = 0;
    for (size_t i = 0; i < n; ++i) {
        keys[i] = order_key(logits[i] + temperature * noise[i]);
        top = std::max(top, keys[i]);
        has_nan |= (bits_of(logits[i]) & 0x7FFFFFFF) > INF_KEY;
    }
    best.has_nan |= has_nan;
    // only a strictly better tile wins: the lowest id at ties
    if (top > best.key)
        best = {top, int32_t(first + size_t(std::find(keys, keys + n, top) - keys)), best.has_nan};
}

// Rows [0, rows) of one position, rows <= GROUP. Returns the first row without a pick, or `rows`.
PAD_VECTOR_CLONES size_t pick_group(const float *logits, size_t rows, size_t vocab, size_t row_stride,
                                    uint32_t position, uint64_t seed, float temperature, int32_t *out_id) {
    Best best[GROUP];
    float tile[TILE] = {};
    for (size_t first = 0; first < vocab; first += TILE) {
        const size_t n = std::min(TILE, vocab - first);
        if (temperature > 0.0f)
            noise(seed, position, PAD_PURPOSE_GUMBEL, 0, uint32_t(first), n, tile);
        for (size_t r = 0; r < rows; ++r)
            update(best[r], logits + r * row_stride + first, tile, temperature, first, n);
    }
    size_t first_bad = rows;
    for (size_t r = rows; r-- > 0;) {
        const bool good = !best[r].has_nan && best[r].key < INF_KEY && best[r].key > order_key(-__builtin_inff());
        out_id[r] = good ? best[r].id : -1;
        if (!good)
            first_bad = r;
    }
    return first_bad;
}

} // namespace

PAD_VECTOR_CLONES void gumbel(uint64_t seed, uint32_t position, uint32_t purpose, uint32_t round, uint32_t first_token,
                              size_t n, float *out) {
    noise(seed, position, purpose, round, first_token, n, out);
}

size_t gumbel_pick(const float *logits, size_t rows, size_t vocab, size_t row_stride, const uint32_t *positions,
                   uint64_t seed, float temperature, int32_t *out_id) {
    size_t first_bad = rows;
    for (size_t r = 0; r < rows;) {
        size_t end = r + 1;
        while (end < rows && end - r < GROUP && positions[end] == positions[r])
            ++end;
        const size_t bad = r + pick_group(logits + r * row_stride, end - r, vocab, row_stride, positions[r], seed,
                                          temperature, out_id + r);
        if (bad < end)
            first_bad = std::min(first_bad, bad);
        r = end;
    }
    return first_bad;
}

} // namespace pad
