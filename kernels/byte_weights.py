"""Weights of one byte as numbers that a card multiplies: in registers, exactly, and by few instructions.

A card's plain conversions of bytes run at a fraction of its sums' rate and could not keep up. So the numbers are put
together from their bits: a byte that is placed in the mantissa of a power of two is that power plus the byte's value
times the last place. Next to read: row_tiles.py, whose products these are for, and quantise.py for the weights.
"""

import triton
import triton.language as tl

from pad_engine.kernels.interpreted import INTERPRETED

# what raised() divides by, and what it makes of zero
RAISE, RAISED_ZERO = tl.constexpr(32768.0), tl.constexpr(1.0 + 128.0 / 32768.0)
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
# int8 as fp32: each number plus 128 is put into the last byte but one of 1
RAISED_FLOATS = tl.constexpr(
    """{
    .reg .b32 bytes;
    xor.b32 bytes, $4, 0x80808080;
    prmt.b32 $0, bytes, 0x3F800000, 0x7604;
    prmt.b32 $1, bytes, 0x3F800000, 0x7614;
    prmt.b32 $2, bytes, 0x3F800000, 0x7624;
    prmt.b32 $3, bytes, 0x3F800000, 0x7634;
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
def four_bytes(w, ASSEMBLY: tl.constexpr):
    """Weights of one byte as fp32, four at a time."""
    return tl.inline_asm_elementwise(ASSEMBLY, "=f,=f,=f,=f,r", [w], dtype=tl.float32, is_pure=True, pack=4)


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
        return four_bytes(w, WHOLE_FLOATS) if kind == tl.float32 else w.to(tl.bfloat16).to(kind)
    elif w.dtype == tl.float8e4nv:
        return w.to(tl.float16).to(tl.float32).to(kind)
    else:
        return w.to(kind)


@triton.jit
def raised(w):
    """int8 as fp32 `1 + (w + 128) / 2^15`, one instruction a number: what is too much is taken from a sum of products
    once, by the sum of the other factors. The sum loses eight bits, so it should be one of a few products."""
    return w.to(tl.float32) / RAISE + RAISED_ZERO if INTERPRETED else four_bytes(w, RAISED_FLOATS)


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
