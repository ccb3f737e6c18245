#include "gumbel.h"

#include <algorithm>
#include <cfloat>
#include <climits>
#include <cstring>

#include "pad.h"
#include "philox.h"

static_assert(FLT_EVAL_METHOD == 0, "each fp32 operation must round to fp32");

namespace pad {
namespace {

constexpr size_t TILE = 256; // tokens whose noise is kept on the stack
constexpr size_t GROUP = 8;  // rows that share one tile of noise
constexpr int32_t INF_KEY = 0x7F800000;

PAD_INLINE int32_t bits_of(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

PAD_INLINE float float_of(int32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// ln((1 + f) * 2^e) for f in [sqrt(1/2) - 1, sqrt(2) - 1]: the polynomial and the split ln 2 of Cephes' logf (Moshier).
PAD_INLINE float ln_poly(float f, float e) {
    const float z = f * f;
    float p = 7.0376836292E-2f;
    p = p * f - 1.1514610310E-1f;
    p = p * f + 1.1676998740E-1f;
    p = p * f - 1.2420140846E-1f;
    p = p * f + 1.4249322787E-1f;
    p = p * f - 1.6668057665E-1f;
    p = p * f + 2.0000714765E-1f;
    p = p * f - 2.4999993993E-1f;
    p = p * f + 3.3333331174E-1f;
    float y = (p * f) * z;
    y = y + e * -2.12194440E-4f;
    y = y - 0.5f * z;
    return (f + y) + e * 0.693359375f;
}

struct Split {
    float f; // x = (1 + f) * 2^e
    float e;
};

// A positive normal x as m * 2^e with m in [sqrt(1/2), sqrt(2)), taken apart by its bits; f = m - 1.
PAD_INLINE Split split(float x) {
    constexpr int32_t SQRT_HALF = 0x3F3504F3;
    const int32_t offset = bits_of(x) - SQRT_HALF;
    return {float_of((offset & 0x007FFFFF) + SQRT_HALF) - 1.0f, float(offset >> 23)};
}

// Both values are computed and one is kept by a mask: a branch would keep the loop from being vectorised.
PAD_INLINE float select(int32_t mask, float yes, float no) {
    return float_of((bits_of(yes) & mask) | (bits_of(no) & ~mask));
}

// -ln(-ln(U)) for 1 - U = (x + 1/2) / 2^32, from whichever of U and 1 - U keeps its digits
PAD_INLINE float gumbel_of(uint32_t x) {
    const float v = float(x) * 0x1p-32f + 0x1p-33f;
    const float u = float(~x) * 0x1p-32f + 0x1p-33f;
    const int32_t near_one = -int32_t(v <= 0.29289323f);
    const Split far = split(u);
    const float e = -ln_poly(select(near_one, -v, far.f), select(near_one, 0.0f, far.e));
    const Split outer = split(e);
    return -ln_poly(outer.f, outer.e);
}

PAD_INLINE void noise(uint64_t seed, uint32_t position, uint32_t purpose, uint32_t round, uint32_t first, size_t n,
                      float *__restrict out) {
    const uint32_t key_low = uint32_t(seed), key_high = uint32_t(seed >> 32);
    for (size_t i = 0; i < n; ++i) {
        const uint32_t token = first + uint32_t(i);
        out[i] = gumbel_of(philox4x32<10>({{position, token, purpose, round}}, key_low, key_high).word[0]);
    }
}

// An integer that orders floats as `<` does (both zeros are 0), so that a maximum is an integer reduction.
PAD_INLINE int32_t order_key(float x) {
    const int32_t bits = bits_of(x + 0.0f);
    return bits ^ ((bits >> 31) & 0x7FFFFFFF);
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
