"""The noise of the kernels has the bits of its reference, on a GPU or in Triton's interpreter."""

import pytest
import torch
import triton
import triton.language as tl
from launches import DEVICE, host_bits, ints

from pad_engine.kernels.gumbel import (
    gumbel_noise,
    gumbel_of_word,
    gumbel_of_word_ref,
    gumbel_pick_ref,
    gumbel_pick_triton,
    gumbel_ref,
    gumbel_score,
)


@triton.jit
def noise_kernel(
    noise_ptr,
    score_ptr,
    seed_ptr,
    position_ptr,
    temperature_ptr,
    logits_ptr,
    first,
    V,
    purpose,
    round_index,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows, place = tl.arange(0, ROWS), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(seed_ptr + rows)[None, :]
    token = (first + place)[:, None]
    noise = gumbel_noise(seed, seed >> 32, tl.load(position_ptr + rows)[None, :], token, purpose, round_index)
    offsets, mask = rows[None, :] * V + place[:, None], (place < V)[:, None]
    tl.store(noise_ptr + offsets, noise, mask=mask)
    logits = tl.load(logits_ptr + offsets, mask=mask)
    tl.store(score_ptr + offsets, gumbel_score(logits, tl.load(temperature_ptr), noise), mask=mask)


@triton.jit
def word_kernel(noise_ptr, word_ptr, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(word_ptr + i, mask=i < N, other=0).to(tl.uint32)
    tl.store(noise_ptr + i, gumbel_of_word(word), mask=i < N)


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-40, 0.7, 1e30])
@pytest.mark.parametrize(
    ("purpose", "round_index", "first", "count"), [(0, 0, 0, 4097), (3, 2**32 - 1, 2**32 - 5, 5), (2, 7, 262_000, 145)]
)
def test_noise_and_scores_have_the_bits_of_torch(
    temperature: float, purpose: int, round_index: int, first: int, count: int
) -> None:
    seeds = [0, 1, -1, 2**32, 2**63 - 1, -(2**63), 0x1E3779B97F4A7C15, 77]
    positions = torch.cat([torch.tensor([0, 1, 2**31, 2**32 - 1]), torch.randint(0, 2**32, (4,))])
    logits = (torch.randn(8, count) * 4).mul(2).round().div(2)
    noise, scores = torch.empty(2, 8, count, device=DEVICE)
    noise_kernel[(triton.cdiv(count, 1024),)](
        noise,
        scores,
        ints(seeds, torch.int64),
        ints(positions, torch.int64),
        ints([temperature], torch.float32),
        logits.to(DEVICE),
        first,
        count,
        purpose,
        round_index,
        ROWS=8,
        BLOCK=1024,
    )
    rows = zip(seeds, positions, strict=True)
    expected = torch.cat([gumbel_ref(s, p[None], count, purpose, round_index, first_token=first) for s, p in rows])
    assert torch.equal(host_bits(noise), host_bits(expected))
    assert torch.equal(host_bits(scores), host_bits(logits + expected * temperature))


def test_noise_of_extreme_words_has_the_bits_of_torch() -> None:
    ends = torch.arange(2000)
    branch = 0x4AFB0D40 + torch.arange(-1000, 1000)  # the last word of the first form
    words = torch.cat([ends, 2**32 - 1 - ends, branch, torch.randint(0, 2**32, (100_000,))])
    noise = torch.empty(len(words), device=DEVICE)
    word_kernel[(triton.cdiv(len(words), 8192),)](noise, words.to(DEVICE), len(words), BLOCK=8192)
    assert torch.equal(host_bits(noise), host_bits(gumbel_of_word_ref(words)))


def test_picks_of_rows_with_seeds_and_temperatures_of_their_own() -> None:
    seeds = torch.tensor([0, -1, 2**63 - 1, 5, 5, 5, 7, 8, 9])
    temperatures = torch.tensor([0.0, 0.7, 1.0, 0.0, 3.0, 0.7, 0.7, 0.0, 0.0])
    positions = torch.tensor([0, 1, 2**32 - 1, 7, 7, 8, 9, 10, 11])
    logits = (torch.randn(9, 2500) * 4).round().div(2)  # with ties
    logits[5, 1:] = -torch.inf
    logits[6, 2400], logits[7, 3], logits[8] = torch.nan, torch.inf, -torch.inf
    each = zip(logits.split(1), positions.split(1), seeds.tolist(), temperatures.tolist(), strict=True)
    expected = torch.cat([gumbel_pick_ref(*row) for row in each])
    assert expected[5:].tolist() == [0, -1, -1, -1] and len(set(expected.tolist())) > 5
    assert torch.equal(gumbel_pick_ref(logits, positions, seeds, temperatures), expected)
    wide = torch.cat((logits, torch.full((9, 60), 99.0)), 1).to(DEVICE)[:, :2500]  # of padded vocabularies
    picks = gumbel_pick_triton(wide, positions.to(DEVICE), seeds.to(DEVICE), temperatures.to(DEVICE))
    assert torch.equal(picks.cpu(), expected)
