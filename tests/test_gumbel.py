"""Shared Gumbel noise: known answers, the same bits in torch and libpad, and the distribution of the picks."""

import re
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from pad_engine import native
from pad_engine.kernels.gumbel import gumbel_of_word_ref, gumbel_pick_ref, gumbel_ref, philox_ref

DOCS = Path(__file__).parent.parent / "docs" / "sampling.md"
needs_libpad = pytest.mark.skipif(not native.available(), reason=native.missing_reason())
PICKS = [gumbel_pick_ref, pytest.param(native.gumbel_pick, marks=needs_libpad)]
FP32_EPS = 2.0**-23


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def documented_rows(columns: int) -> list[list[str]]:
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in DOCS.read_text().splitlines()]
    found = [row for row in rows if len(row) == columns and re.fullmatch(r"(0x)?[0-9a-f]+", row[0])]
    assert found
    return found


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_known_answers_of_random123(counter: str, key: str, expected: str) -> None:
    words = [torch.tensor([int(word, 16) for word in text.split()]) for text in (counter, key, expected)]
    assert torch.equal(philox_ref(words[0], words[1]), words[2])


def test_philox_broadcasts_and_refuses() -> None:
    counters, key = torch.randint(0, 2**32, (5, 1, 4)), torch.randint(0, 2**32, (3, 2))
    blocks = philox_ref(counters, key)
    assert blocks.shape == (5, 3, 4)
    assert torch.equal(blocks[4, 2], philox_ref(counters[4, 0], key[2]))
    with pytest.raises(ValueError, match=r"counter must be \[\.\.\., 4\]"):
        philox_ref(counters.int(), key)


@pytest.mark.parametrize("row", documented_rows(8), ids=lambda row: "-".join(row[:5]))
def test_documented_vectors(row: list[str]) -> None:
    seed, position, token, purpose, round_index = int(row[0], 16), *(int(cell) for cell in row[1:5])
    counter, key = torch.tensor([position, token, purpose, round_index]), torch.tensor([seed % 2**32, seed >> 32])
    assert " ".join(f"{word:08x}" for word in philox_ref(counter, key).tolist()) == row[5]
    noise = gumbel_ref(seed, torch.tensor([position]), 1, purpose, round_index, first_token=token)[0]
    assert f"{int(bits(noise)) % 2**32:08x}" == row[6]
    if native.available():
        assert torch.equal(bits(native.gumbel(seed, position, 1, purpose, round_index, token)), bits(noise))


@pytest.mark.parametrize("row", documented_rows(3), ids=lambda row: row[0])
def test_documented_words(row: list[str]) -> None:
    assert f"{int(bits(gumbel_of_word_ref(torch.tensor([int(row[0], 16)])))) % 2**32:08x}" == row[1]


def test_noise_of_extreme_words_is_finite_and_accurate() -> None:
    ends = torch.arange(2000)
    branch = 0x4AFB0D40 + torch.arange(-1000, 1000)  # the last word of the first form
    words = torch.cat([ends, 2**32 - 1 - ends, branch, torch.randint(0, 2**32, (200_000,))])
    noise = gumbel_of_word_ref(words)
    # 1 - U below one half and U above it each have their own form that keeps the digits
    exact = -torch.log(-torch.log1p(-(words.double() + 0.5) / 2**32))
    exact = torch.where(words < 2**31, exact, -torch.log(-torch.log((2**32 - words.double() - 0.5) / 2**32)))
    assert noise.isfinite().all()
    assert ((noise - exact).abs() <= 4 * FP32_EPS * exact.abs().clamp(min=1)).all()
    assert noise.min() > -3.14 and noise.max() < 22.9


@needs_libpad
@pytest.mark.parametrize("seed", [0, 1, -1, 2**32, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15])
def test_libpad_gives_the_bits_of_torch(seed: int) -> None:
    positions = torch.cat([torch.tensor([0, 1, 2**31, 2**32 - 1]), torch.randint(0, 2**32, (4,))])
    for purpose, round_index, first, count in [(0, 0, 0, 4097), (3, 2**32 - 1, 2**32 - 5, 5), (2, 7, 262_000, 145)]:
        expected = gumbel_ref(seed, positions, count, purpose, round_index, first_token=first)
        for row, position in enumerate(positions.tolist()):
            noise = native.gumbel(seed, position, count, purpose, round_index, first)
            assert torch.equal(bits(noise), bits(expected[row]))


@needs_libpad
@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-8, 0.1, 0.7, 1.0, 10.0, 1e30])
@pytest.mark.parametrize("vocab", [1, 2, 255, 256, 257, 4097, 49_152])
def test_libpad_picks_as_torch(vocab: int, temperature: float) -> None:
    logits = (torch.randn(12, vocab) * 4).mul(8).round().div(8)  # coarse, so that ties occur
    logits[3, ::2] = float("-inf")
    logits[3, vocab // 2] = 1.0
    positions = torch.tensor([5, 5, 5, 6, 6, 2**32 - 1, 0, 0, 0, 0, 0, 5])
    assert torch.equal(
        native.gumbel_pick(logits, positions, 1234, temperature), gumbel_pick_ref(logits, positions, 1234, temperature)
    )


@pytest.mark.parametrize("pick", PICKS)
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_picks_follow_the_softmax(pick, temperature: float) -> None:
    draws, vocab = 200_000, 8
    row = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, 0.5, -3.0, 1.5])
    picks = pick(row.expand(draws, vocab), torch.arange(draws), 2024, temperature)
    expected = torch.softmax(row.double() / temperature, 0) * draws
    assert chisquare(torch.bincount(picks.long(), minlength=vocab).numpy(), expected.numpy()).pvalue > 1e-3


@pytest.mark.parametrize("over", ["seeds", "tokens"])
def test_noise_is_gumbel_along_every_axis(over: str) -> None:
    position = torch.tensor([17])
    if over == "seeds":
        noise = torch.cat([gumbel_ref(seed, position, 1) for seed in range(4000)])
    else:
        noise = gumbel_ref(5, position, 100_000)
    counts = torch.histc(torch.exp(-torch.exp(-noise)), bins=20, min=0, max=1)  # its distribution function: uniform
    assert chisquare(counts.numpy()).pvalue > 1e-3


@pytest.mark.parametrize("pick", PICKS)
def test_ties_pick_the_lowest_id(pick) -> None:
    logits = torch.zeros(4, 600)
    logits[:, 300:] = 1.0
    logits[2, 10] = -0.0
    # far below the spacing of fp32 logits at 1.0, the noise is rounded away
    for temperature in (0.0, 1e-12):
        assert pick(logits, torch.arange(4), 3, temperature).tolist() == [300] * 4
    signed_zeros = torch.tensor([[-1.0, -0.0, 0.0]])
    assert pick(signed_zeros, torch.tensor([0]), 3, 0.0).tolist() == [1]


@pytest.mark.parametrize("pick", PICKS)
@pytest.mark.parametrize("temperature", [1e-8, 1e-40, 0.0])
def test_tiny_temperatures_are_greedy(pick, temperature: float) -> None:
    logits = torch.randn(16, 1000) * 1e4
    logits[1] *= 1e30
    logits[2, 1:] = float("-inf")
    picks = pick(logits, torch.arange(16), 9, temperature)
    assert torch.equal(picks.long(), logits.argmax(-1))


@pytest.mark.parametrize("pick", PICKS)
@pytest.mark.parametrize("temperature", [1e-8, 1.0, 1e30])
def test_masked_tokens_are_never_picked(pick, temperature: float) -> None:
    logits = torch.full((500, 40), float("-inf"))
    logits[:, 7] = -50.0
    logits[:, 31] = 50.0
    picks = pick(logits, torch.arange(500), 11, temperature)
    assert set(picks.tolist()) <= {7, 31}


@pytest.mark.parametrize("pick", PICKS)
@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf"), 2e30])
def test_bad_temperatures_are_refused(pick, temperature: float) -> None:
    with pytest.raises((ValueError, native.NativeError), match="temperature must be in"):
        pick(torch.zeros(1, 4), torch.tensor([0]), 0, temperature)


def test_rows_without_a_pick_in_torch() -> None:
    logits = torch.zeros(5, 4)
    logits[1, 2], logits[2, 0], logits[3] = float("nan"), float("inf"), float("-inf")
    assert (gumbel_pick_ref(logits, torch.arange(5), 0, 1.0) < 0).tolist() == [False, True, True, True, False]


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"logits must be \[R, V\] float32"):
        gumbel_pick_ref(torch.zeros(2, 3, dtype=torch.bfloat16), torch.arange(2), 0, 1.0)
    with pytest.raises(ValueError, match=r"positions must be \[R\] integers"):
        gumbel_ref(0, torch.zeros(2), 3)


@pytest.mark.gpu
def test_torch_on_cuda_gives_the_same_bits() -> None:
    positions = torch.randint(0, 2**32, (5,))
    assert torch.equal(
        bits(gumbel_ref(77, positions, 50_000)), bits(gumbel_ref(77, positions, 50_000, device="cuda").cpu())
    )
