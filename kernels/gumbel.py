"""Gumbel noise keyed by (seed, position, token id): the torch definition, and Triton functions for kernels to call.

Every step is a correctly rounded fp32 operation or an integer one, in a fixed order, so that torch, libpad and Triton
give the same bits; docs/sampling.md has the formula and test vectors. Next file: csrc/cpu/gumbel.cpp, the same in C++.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pad_engine.kernels.rounded import add_rn, mul_rn

# what a random number is for: the third word of the Philox counter (pad_purpose in pad.h)
GUMBEL, ACCEPT, RESIDUAL, DRAFT = range(4)

MAX_TEMPERATURE = 1e30  # PAD_MAX_TEMPERATURE: temperature * noise stays finite in fp32

_MASK = 0xFFFFFFFF
_SQRT_HALF = 0x3F3504F3  # the bits of fp32 sqrt(1/2)
# Cephes' logf (Moshier), highest power first
_LN_COEFFICIENTS = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)


def philox_ref(counter: Tensor, key: Tensor) -> Tensor:
    """Philox4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011).

    counter: `[..., 4]` and key: `[..., 2]` int64 holding 32-bit words, batch dimensions broadcast.
    Returns the `[..., 4]` int64 words of the blocks.
    """
    if counter.dtype != torch.int64 or key.dtype != torch.int64 or counter.shape[-1] != 4 or key.shape[-1] != 2:
        raise ValueError(
            "counter must be [..., 4] int64 and key [..., 2] int64, "
            f"got {tuple(counter.shape)} {counter.dtype} and {tuple(key.shape)} {key.dtype}"
        )
    return torch.stack(torch.broadcast_tensors(*_philox_words(counter.unbind(-1), key.unbind(-1))), dim=-1)


def _philox_words(counter: Sequence[Any], key: Sequence[Any]) -> tuple[Any, ...]:
    """Words are int64 tensors or plain ints; ints stay on the host, so that a GPU waits for no copy."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # int64 products wrap modulo 2^64, which leaves their 64 bits right; the mask undoes the sign of the shift
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c2 = (product1 >> 32 & _MASK) ^ c1 ^ k0, (product0 >> 32 & _MASK) ^ c3 ^ k1
        c1, c3 = product1 & _MASK, product0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int, token: int, purpose: int, round_index: int) -> float:
    """One number in [0, 1), a multiple of 2^-32, from the same counter as the noise."""
    words = _philox_words((position & _MASK, token, purpose, round_index), (seed & _MASK, seed >> 32 & _MASK))
    return int(words[0]) * 2.0**-32


def _ln_poly(f: Tensor, e: Tensor) -> Tensor:
    """ln((1 + f) * 2^e) for fp32 f in [sqrt(1/2) - 1, sqrt(2) - 1] and a whole e."""
    z = f * f
    p = torch.full_like(f, _LN_COEFFICIENTS[0])
    for coefficient in _LN_COEFFICIENTS[1:]:
        p = p * f + coefficient
    y = (p * f) * z
    y = y + e * -2.12194440e-4
    y = y - 0.5 * z
    return (f + y) + e * 0.693359375


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Positive normal fp32 x as (1 + f) * 2^e with 1 + f in [sqrt(1/2), sqrt(2)): (f, e), both fp32."""
    offset = x.view(torch.int32) - _SQRT_HALF
    m = ((offset & 0x007FFFFF) + _SQRT_HALF).view(torch.float32)
    return m - 1.0, (offset >> 23).float()


def gumbel_of_word_ref(word: Tensor) -> Tensor:
    """word: int64 `[...]` in [0, 2^32). Returns fp32 -ln(-ln(U)) with 1 - U = (word + 1/2) / 2^32, always finite."""
    v = word.float() * 2.0**-32 + 2.0**-33
    u = (_MASK - word).float() * 2.0**-32 + 2.0**-33
    near_one = v <= 0.29289323
    f, e = _split(u)
    exponential = -_ln_poly(torch.where(near_one, -v, f), torch.where(near_one, 0.0, e))
    return -_ln_poly(*_split(exponential))


def gumbel_ref(
    seed: int | Tensor,
    positions: Tensor,
    num_tokens: int,
    purpose: int = GUMBEL,
    round_index: int = 0,
    device: torch.device | str | None = None,
    first_token: int = 0,
) -> Tensor:
    """Gumbel noise of token ids first_token .. first_token + num_tokens - 1 at each position.

    seed: any int, taken modulo 2^64, or int64 `[R]`, its bits for each row. positions: `[R]` of an integer dtype, taken
    modulo 2^32. Returns fp32 `[R, num_tokens]` on `device` (that of positions by default).
    """
    if positions.dim() != 1 or positions.is_floating_point():
        raise ValueError(f"positions must be [R] integers, got {tuple(positions.shape)} {positions.dtype}")
    device = positions.device if device is None else torch.device(device)
    tokens = torch.arange(first_token, first_token + num_tokens, dtype=torch.int64, device=device)
    seed = seed.to(device)[:, None] if isinstance(seed, Tensor) else seed
    counter = (positions.to(device, torch.int64)[:, None] & _MASK, tokens[None, :], purpose, round_index)
    return gumbel_of_word_ref(_philox_words(counter, (seed & _MASK, seed >> 32 & _MASK))[0])


def check_temperature(temperature: float) -> None:
    """Raise ValueError unless temperature is in [0, MAX_TEMPERATURE], which NaN is not."""
    if not 0.0 <= temperature <= MAX_TEMPERATURE:
        raise ValueError(f"temperature must be in [0, {MAX_TEMPERATURE:g}], got {temperature}")


def gumbel_pick_ref(logits: Tensor, positions: Tensor, seed: int | Tensor, temperature: float | Tensor) -> Tensor:
    """One draw a row from softmax(logits / temperature): argmax of logits + temperature * noise, lowest id at ties.

    logits: fp32 `[R, V]`. positions: `[R]` integers. seed: as of gumbel_ref. temperature: rounded to fp32, or fp32
    `[R]`; 0 is the plain argmax. Returns int32 `[R]`; -1 for a row that has a NaN or whose best score is not finite.
    Does not synchronise a GPU.
    """
    if not isinstance(temperature, Tensor):
        check_temperature(temperature)
    if logits.dim() != 2 or logits.dtype != torch.float32 or positions.shape != logits.shape[:1]:
        raise ValueError(
            "logits must be [R, V] float32 and positions [R], "
            f"got {tuple(logits.shape)} {logits.dtype} and {tuple(positions.shape)}"
        )
    scores = logits
    if isinstance(temperature, Tensor) or temperature > 0:
        noise = gumbel_ref(seed, positions, logits.shape[1], device=logits.device)
        # two roundings, product and sum: no fused multiply-add
        scores = logits + noise * (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    best, picks = scores.max(dim=-1)
    return torch.where(best.isfinite(), picks, -1).int()


_LN = tl.constexpr(_LN_COEFFICIENTS)
_NEAR_ONE = tl.constexpr(0.29289323)
_SQRT_HALF_BITS = tl.constexpr(_SQRT_HALF)


@triton.jit
def philox_word(c0, c1, c2, c3, k0, k1):
    """Word 0 of philox_ref's block, from uint32 words."""
    for _ in tl.static_range(10):
        # whole products take one wide multiplication; umulhi and `*`, as in tl.philox_impl, take two
        product0, product1 = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c2 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0, (product0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = product1.to(tl.uint32), product0.to(tl.uint32)
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0


@triton.jit
def ln_poly(f, e):
    """_ln_poly."""
    z = mul_rn(f, f)
    p = add_rn(mul_rn(f, _LN[0]), _LN[1])
    for i in tl.static_range(2, 9):
        p = add_rn(mul_rn(p, f), _LN[i])
    y = mul_rn(mul_rn(p, f), z)
    y = add_rn(y, mul_rn(e, -2.12194440e-4))
    y = add_rn(y, mul_rn(z, -0.5))
    return add_rn(add_rn(f, y), mul_rn(e, 0.693359375))


@triton.jit
def split_exponent(x):
    """_split."""
    offset = x.to(tl.int32, bitcast=True) - _SQRT_HALF_BITS
    m = ((offset & 0x007FFFFF) + _SQRT_HALF_BITS).to(tl.float32, bitcast=True)
    return add_rn(m, -1.0), (offset >> 23).to(tl.float32)


@triton.jit
def gumbel_of_word(word):
    """gumbel_of_word_ref of uint32 words, to the same bits. Each product and sum is rounded on its own."""
    v = add_rn(mul_rn(word.to(tl.float32), 2.0**-32), 2.0**-33)
    u = add_rn(mul_rn((0xFFFFFFFF - word).to(tl.float32), 2.0**-32), 2.0**-33)
    near_one = v <= _NEAR_ONE
    f, e = split_exponent(u)
    f, e = split_exponent(-ln_poly(tl.where(near_one, -v, f), tl.where(near_one, 0.0, e)))
    return -ln_poly(f, e)


@triton.jit
def gumbel_noise(seed_lo, seed_hi, position, token, purpose=0, round_index=0):
    """gumbel_ref to the same bits, fp32 in the shape that the arguments broadcast to.

    They are integers of which the low 32 bits count. seed_lo and seed_hi: the halves of the seed.
    """
    c0, c1 = tl.broadcast(position.to(tl.uint32), token.to(tl.uint32))
    c2, c3 = tl.cast(purpose, tl.uint32), tl.cast(round_index, tl.uint32)
    return gumbel_of_word(philox_word(c0, c1, c2, c3, seed_lo.to(tl.uint32), seed_hi.to(tl.uint32)))


@triton.jit
def gumbel_score(logits, temperature, noise):
    """fp32 logits + temperature * noise in two roundings, as in gumbel_pick_ref."""
    return add_rn(logits, mul_rn(noise, temperature))


@triton.jit
def gumbel_pick_kernel(logits_ptr, stride, position_ptr, seed_ptr, temperature_ptr, pick_ptr, V, BLOCK: tl.constexpr):
    """One row a program. In each lane the best score of its tokens so far and the first of them that has it."""
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    position, seed = tl.load(position_ptr + row), tl.load(seed_ptr + row)
    temperature = tl.load(temperature_ptr + row)
    best, best_token = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.int32)
    wrong = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        token = start + lane
        logits = tl.load(logits_ptr + row * stride + token, mask=token < V, other=float("-inf"))
        score = gumbel_score(logits, temperature, gumbel_noise(seed, seed >> 32, position, token))
        wrong = wrong | (score != score).to(tl.int32)
        better = score > best
        best, best_token = tl.where(better, score, best), tl.where(better, token, best_token)
    top = tl.max(best, 0)
    pick = tl.min(tl.where(best == top, best_token, 2147483647), 0)
    bad = (tl.max(wrong, 0) > 0) | (top == float("inf")) | (top == float("-inf"))
    tl.store(pick_ptr + row, tl.where(bad, -1, pick))


def gumbel_pick_triton(logits: Tensor, positions: Tensor, seeds: Tensor, temperatures: Tensor) -> Tensor:
    """Launch the kernel: gumbel_pick_ref of rows with seeds, int64 `[R]`, and temperatures, fp32 `[R]`, of their own.
    logits: unit stride over V."""
    picks = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    gumbel_pick_kernel[(len(logits),)](
        logits, logits.stride(0), positions, seeds, temperatures, picks, logits.shape[1], BLOCK=1024
    )
    return picks
