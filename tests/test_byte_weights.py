"""The assembly that makes numbers of weights of one byte, instruction by instruction on the CPU, for every byte."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import triton.language as tl

from pad_engine.kernels import byte_weights
from pad_engine.kernels.quantise import QUANTISED


def halves(word: int) -> torch.Tensor:
    """The two bf16 of a register, as fp64."""
    return torch.tensor(np.array([word], np.uint32).view(np.int16)).view(torch.bfloat16).double()


def single(word: int) -> np.float32:
    """The fp32 of a register."""
    return np.uint32(word).view(np.float32)


def permuted(a: int, b: int, selector: int) -> int:
    source = [*a.to_bytes(4, "little"), *b.to_bytes(4, "little")]
    return int.from_bytes(bytes(source[selector >> 4 * i & 7] for i in range(4)), "little")


def fused(a: int, b: int, c: int) -> int:
    """Exact in fp64 for these numbers, then rounded once."""
    sums = (halves(a) * halves(b) + halves(c)).to(torch.bfloat16)
    return int(sums.view(torch.int16).numpy().view(np.uint32)[0])


def signed(word: int) -> list[int]:
    """The four int8 of a register."""
    return [byte - 256 if byte > 127 else byte for byte in word.to_bytes(4, "little")]


def both_then_or(a: int, b: int, c: int, table: int) -> int:
    assert table == 0xEA
    return a & b | c


OPERATIONS: dict[str, Callable[..., int]] = {
    "mov.b32": lambda a: a,
    "xor.b32": lambda a, b: a ^ b,
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, n: a << n & 0xFFFFFFFF,
    "shr.u32": lambda a, n: a >> n,
    "lop3.b32": both_then_or,
    "prmt.b32": permuted,
    "fma.rn.bf16x2": fused,
    "sub.f32": lambda a, b: int((single(a) - single(b)).view(np.uint32)),
    "dp4a.s32.s32": lambda a, b, c: sum(x * y for x, y in zip(signed(a), signed(b), strict=True)) + c,
}


def run(assembly: tl.constexpr, *words: int, outputs: int = 4) -> list[int]:
    """The outputs of a piece of assembly, whose inputs come behind them."""
    body = assembly.value.strip("{}")
    registers = {f"${outputs + place}": word for place, word in enumerate(words)}

    def value(operand: str) -> int:
        if operand.startswith("0f"):
            return int(operand[2:], 16)
        return registers[operand] if operand in registers else int(operand, 0)

    for line in filter(None, map(str.strip, body.split(";"))):
        name, rest = line.split(None, 1)
        if name != ".reg":
            to, *operands = (operand.strip() for operand in rest.split(","))
            registers[to] = OPERATIONS[name](*map(value, operands))
    return [registers[f"${place}"] for place in range(outputs)]


def words_of(values: list[int]) -> list[int]:
    raw = bytes(values)
    return [int.from_bytes(raw[first : first + 4], "little") for first in range(0, len(raw), 4)]


@pytest.mark.parametrize(("name", "kind"), [("WHOLE_HALVES", "int8"), ("SMALL_FLOATS", "fp8")])
def test_two_words_become_pairs_of_bf16(name: str, kind: str) -> None:
    for first in range(256):
        raw = [(first + 37 * place) % 256 for place in range(8)]
        expected = torch.tensor(raw, dtype=torch.uint8).view(QUANTISED[kind]).double().view(2, 4)
        found = torch.stack([halves(word) for word in run(getattr(byte_weights, name), *words_of(raw))], 1)
        known = expected.isfinite()  # fp8 has two NaN, which no weight is
        assert torch.equal(found[known], expected[known]), raw


def test_a_word_becomes_four_fp32() -> None:
    for first in range(256):
        raw = [(first + 91 * place) % 256 for place in range(4)]
        found = [float(single(word)) for word in run(byte_weights.WHOLE_FLOATS, *words_of(raw))]
        assert found == [byte - 256 if byte > 127 else byte for byte in raw]


def digits_of(numbers: list[int]) -> list[int]:
    """The words of higher and of lower digits of four numbers, from fp32 that hold them as digits() has it."""
    floats = [int((np.float32(number) + np.float32(12583040.0)).view(np.uint32)) for number in numbers]
    return run(byte_weights.DIGITS, *floats, outputs=2)


def test_numbers_of_two_digits() -> None:
    for first in range(-(2**14), 2**14 - 3, 89):
        numbers = [first, -first, first + 3, 2**14 if first % 2 else -(2**14)]
        high, low = (signed(word) for word in digits_of(numbers))
        assert [256 * upper + lower for upper, lower in zip(high, low, strict=True)] == numbers


def test_eight_int8_times_eight_numbers() -> None:
    generator = np.random.default_rng(3)
    for _ in range(100):
        w = generator.integers(-127, 128, 8).tolist()
        x = generator.integers(-(2**14), 2**14 + 1, 8).tolist()
        high, low = zip(digits_of(x[:4]), digits_of(x[4:]), strict=True)
        # registers hold 32 bits, of which a negative sum's are those of its complement
        (found,) = run(byte_weights.DIGIT_SUM, *words_of([one % 256 for one in w]), *high, *low, outputs=1)
        assert (found - sum(a * b for a, b in zip(w, x, strict=True))) % 2**32 == 0
