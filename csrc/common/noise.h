// From a Philox word to a Gumbel number or a uniform one, to the same bits on every machine. docs/sampling.md has the
// maths.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/hd.h"
#include "common/philox.h"

namespace pad {

constexpr int32_t INF_KEY = 0x7F800000; // order_key of +inf

PAD_HD int32_t bits_of(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

PAD_HD float float_of(int32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// ln((1 + f) * 2^e) for f in [sqrt(1/2) - 1, sqrt(2) - 1]: the polynomial and the split ln 2 of Cephes' logf (Moshier).
PAD_HD float ln_poly(float f, float e) {
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
PAD_HD Split split(float x) {
    constexpr int32_t SQRT_HALF = 0x3F3504F3;
    const int32_t offset = bits_of(x) - SQRT_HALF;
    return {float_of((offset & 0x007FFFFF) + SQRT_HALF) - 1.0f, float(offset >> 23)};
}

// Both values are computed and one is kept by a mask: a branch would keep the loop from being vectorised.
PAD_HD float select(int32_t mask, float yes, float no) {
    return float_of((bits_of(yes) & mask) | (bits_of(no) & ~mask));
}

// -ln(-ln(U)) for 1 - U = (x + 1/2) / 2^32, from whichever of U and 1 - U keeps its digits
PAD_HD float gumbel_of(uint32_t x) {
    const float v = float(x) * 0x1p-32f + 0x1p-33f;
    const float u = float(~x) * 0x1p-32f + 0x1p-33f;
    const int32_t near_one = -int32_t(v <= 0.29289323f);
    const Split far = split(u);
    const float e = -ln_poly(select(near_one, -v, far.f), select(near_one, 0.0f, far.e));
    const Split outer = split(e);
    return -ln_poly(outer.f, outer.e);
}

// The word that belongs to a token at a position; first word of the block.
PAD_HD uint32_t word_of(uint64_t seed, uint32_t position, uint32_t token, uint32_t purpose, uint32_t round) {
    return philox4x32<10>({{position, token, purpose, round}}, uint32_t(seed), uint32_t(seed >> 32)).word[0];
}

// A number in [0, 1), a multiple of 2^-32, from the same counter as the noise.
PAD_HD double uniform_of(uint64_t seed, uint32_t position, uint32_t token, uint32_t purpose, uint32_t round) {
    return double(word_of(seed, position, token, purpose, round)) * 0x1p-32;
}

// An integer that orders floats as `<` does (both zeros are 0), so that a maximum is an integer reduction.
PAD_HD int32_t order_key(float x) {
    const int32_t bits = bits_of(x + 0.0f);
    return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}

} // namespace pad
