"""Weights of one byte as numbers that a card multiplies: in registers, exactly, and by few instructions.

A card's plain conversions of bytes run at a fraction of its sums' rate and could not keep up. So the numbers are put
together from their bits: a byte that is placed in the mantissa of a power of two is that power plus the byte's value
times the last place. Next to read: row_tiles.py, whose products these are for, and quantise.py for the weights.
"""

import triton
import triton.language as tl

from pad_engine.kernels.interpreted import INTERPRETED

# int8 as fp32: each number plus 128 is put into the last byte of 2^23, and 2^23 + 128 is taken away
WHOLE_FLOATS = tl.constexpr(
    """{
    .reg .b32 bytes, a, b, c, d;
    xor.b32 bytes, $4, 0x80808080;
    prmt.b32 a, bytes, 0x4B000000, 0x7540;
    prmt.b32 b, bytes, 0x4B000000, 0x7541;
    prmt.b32 c, bytes, 0x4B000000, 0x7542;
    prmt.b32 d, bytes, 0x4B000000, 0x7543;
    sub.f32 $0, a, 0f4B000080;
    sub.f32 $1, b, 0f4B000080;
    sub.f32 $2, c, 0f4B000080;
    sub.f32 $3, d, 0f4B000080;
}"""
)
# four numbers plus 128, which lie in the last places of an fp32's mantissa: a word of their higher and one of their
# lower digits to the base of 256, with signs
DIGITS = tl.constexpr(
    """{
    .reg .b32 a, b;
    prmt.b32 a, $2, $3, 0x5140;
    prmt.b32 b, $4, $5, 0x5140;
    prmt.b32 $0, a, b, 0x7632;
    prmt.b32 $1, a, b, 0x5410;
    xor.b32 $1, $1, 0x80808080;
}"""
)
# eight int8, in two words, times eight numbers of two digits, summed: words, higher digits, lower digits
DIGIT_SUM = tl.constexpr(
    """{
    .reg .b32 sum;
    dp4a.s32.s32 sum, $1, $3, 0;
    dp4a.s32.s32 sum, $2, $4, sum;
    shl.b32 sum, sum, 8;
    dp4a.s32.s32 sum, $1, $5, sum;
    dp4a.s32.s32 $0, $2, $6, sum;
}"""
)
# int8 as bf16, two words at a time: 128 and the lower seven bits, less 128 or, by the sign, 256
WHOLE_HALVES = tl.constexpr(
    """{
    .reg .b32 u, v, s, t, a, b, one;
    mov.b32 one, 0x3F803F80;
    prmt.b32 u, $4, $5, 0x5410;
    prmt.b32 v, $4, $5, 0x7632;
    shr.u32 s, u, 8;
    shr.u32 t, v, 8;
"""
    + "".join(
        f"""    lop3.b32 a, {pair}, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 b, {pair}, 0x00800080, 0xC300C300, 0xEA;
    fma.rn.bf16x2 ${place}, a, one, b;
"""
        for place, pair in enumerate("usvt")
    )
    + "}"
)
# fp8 (e4m3) as bf16, two words at a time: the bits moved to their places are the number over 2^120, also of subnormal
# ones. No weight is a NaN (quantise.py)
SMALL_FLOATS = tl.constexpr(
    """{
    .reg .b32 u, v, a, b, scale, zero;
    mov.b32 scale, 0x7B807B80;
    mov.b32 zero, 0x80008000;
    prmt.b32 u, $4, $5, 0x5410;
    prmt.b32 v, $4, $5, 0x7632;
"""
    + "".join(
        f"""    shl.b32 a, {pairs}, 8;
    and.b32 a, a, 0x80008000;
    shl.b32 b, {pairs}, 4;
    lop3.b32 a, b, 0x07F007F0, a, 0xEA;
    fma.rn.bf16x2 ${place}, a, scale, zero;
    and.b32 a, {pairs}, 0x80008000;
    shr.u32 b, {pairs}, 4;
    lop3.b32 a, b, 0x07F007F0, a, 0xEA;
    fma.rn.bf16x2 ${place + 1}, a, scale, zero;
"""
        for place, pairs in ((0, "u"), (2, "v"))
    )
    + "}"
)


@triton.jit
def four_bytes(w):
    """int8 as fp32, four at a time."""
    return tl.inline_asm_elementwise(WHOLE_FLOATS, "=f,=f,=f,=f,r", [w], dtype=tl.float32, is_pure=True, pack=4)


@triton.jit
def two_words(words, ASSEMBLY: tl.constexpr):
    """The four bytes of each int32 word, by place, as bf16; two words at a time."""
    return tl.inline_asm_elementwise(
        ASSEMBLY,
        "=r,=r,=r,=r,r,r",
        [words],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def exactly(w, kind: tl.constexpr):
    """Weights of any type in a wider one, which holds them exactly."""
    if w.dtype == tl.int8 and not INTERPRETED:
        return four_bytes(w) if kind == tl.float32 else w.to(tl.bfloat16).to(kind)
    elif w.dtype == tl.float8e4nv:
        return w.to(tl.float16).to(tl.float32).to(kind)
    else:
        return w.to(kind)


@triton.jit
def largest_or_nan(a, b):
    """The larger of two numbers, and NaN beside anything."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def digits(x):
    """fp32 `[N]` as whole numbers below 2^14 times a power of two for each eight neighbours: int32 words `[1, N / 4]`
    of the numbers' higher and of their lower digits to the base of 256, and the powers, fp32 `[1, N / 8]`, NaN where a
    number is not finite. What is less than 2^-14 of the largest of eight is lost."""
    groups = tl.reshape(x, (x.shape[0] // 8, 8))
    exponent = tl.reduce(tl.abs(groups), 1, largest_or_nan).to(tl.int32, bitcast=True) >> 23
    kept = tl.maximum(exponent, 14)
    unit = tl.where(exponent == 255, float("nan"), ((kept - 13) << 23).to(tl.float32, bitcast=True))
    # beyond 1.5 * 2^23 the last place of an fp32 is one: the sum is rounded to whole numbers, and its bits hold them
    whole = groups * ((267 - kept) << 23).to(tl.float32, bitcast=True)[:, None] + 12583040.0
    bits = tl.reshape(whole.to(tl.int32, bitcast=True), (1, x.shape[0]))
    a, b, c, d = quarters(bits)
    if INTERPRETED:
        low = (a & 255) | ((b & 255) << 8) | ((c & 255) << 16) | ((d & 255) << 24)
        high = ((a >> 8) & 255) | (((b >> 8) & 255) << 8) | (((c >> 8) & 255) << 16) | (((d >> 8) & 255) << 24)
        low = low ^ -2139062144
    else:
        high, low = tl.inline_asm_elementwise(
            DIGITS, "=r,=r,r,r,r,r", [a, b, c, d], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
    return high, low, unit[None, :]


@triton.jit
def digit_sums(words, high, low):
    """int32 `[BLOCK, N / 2]`: the eight int8 of two neighbouring words `[BLOCK, N]` times their eight numbers of two
    digits, summed; exact. high, low: `[1, N]`, of digits()."""
    w_0, w_1 = halves(words)
    high_0, high_1 = halves(high)
    low_0, low_1 = halves(low)
    if INTERPRETED:
        return whole_sum(w_0, high_0, low_0) + whole_sum(w_1, high_1, low_1)
    else:
        return tl.inline_asm_elementwise(
            DIGIT_SUM, "=r,r,r,r,r,r,r", [w_0, w_1, high_0, high_1, low_0, low_1], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def halves(words):
    """The words of `[ROWS, N]` by their place among two: two of `[ROWS, N / 2]`."""
    return tl.split(tl.reshape(words, (words.shape[0], words.shape[1] // 2, 2)))


@triton.jit
def whole_sum(words, high, low):
    """What DIGIT_SUM makes of one word."""
    total = tl.zeros_like(words)
    for bit in tl.static_range(0, 32, 8):
        number = number_at(high, bit, tl.int8, tl.int32) * 256 + number_at(low, bit, tl.int8, tl.int32)
        total += number_at(words, bit, tl.int8, tl.int32) * number
    return total


@triton.jit
def quarters(x):
    """The columns of x `[ROWS, N]` by their place in a word of four: four of `[ROWS, N / 4]`."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 4, 2, 2)))
    x_0, x_2 = tl.split(even)
    x_1, x_3 = tl.split(odd)
    return x_0, x_1, x_2, x_3


@triton.jit
def four_numbers(words, w_ptr, kind: tl.constexpr):
    """The four weights of each int32 word, by place, in a type that holds them exactly. w_ptr: of their own type."""
    of: tl.constexpr = w_ptr.dtype.element_ty
    if INTERPRETED or kind != tl.bfloat16:
        return (
            number_at(words, 0, of, kind),
            number_at(words, 8, of, kind),
            number_at(words, 16, of, kind),
            number_at(words, 24, of, kind),
        )
    else:
        return two_words(words, WHOLE_HALVES if of == tl.int8 else SMALL_FLOATS)


@triton.jit
def number_at(words, bit: tl.constexpr, of: tl.constexpr, kind: tl.constexpr):
    """The weight that begins at this bit of each word."""
    byte = (words >> bit).to(tl.int8)
    if of != tl.int8:
        byte = byte.to(of, bitcast=True)
    return byte.to(tl.float32).to(kind)
