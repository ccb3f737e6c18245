"""What bench_generate.py compares: sums of medians, and texts that deserve their names."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from benches import bench_module

from pad_engine import SamplingParams

bench, compare = bench_module("bench_generate"), bench_module("compare")


class Engine:
    """Answers with the prompt's ids, and takes the seconds that it is told."""

    def __init__(self, seconds: list[float], rounds: int = 1) -> None:
        self.seconds, self.rounds = list(seconds), rounds

    def generate(self, ids: list[int], params: SamplingParams) -> Any:
        seconds = self.seconds.pop(0)
        stats = SimpleNamespace(
            decode_seconds=seconds, completion_tokens=10, rounds=self.rounds, draft_tokens=8, accepted_tokens=6
        )
        return SimpleNamespace(stats=stats, token_ids=[*ids, self.rounds] if ids == [1] else ids)


def test_a_comparison_sums_medians() -> None:
    plain, fast = Engine([4.0, 9.0, 5.0, 2.0, 2.0, 2.0]), Engine([1.0, 7.0, 2.0, 1.0, 1.0, 3.0], rounds=4)
    found = compare.compare(plain, fast, [[1], [2]], SamplingParams(10), turns=3)
    assert (found.plain_seconds, found.seconds, found.over_plain) == (5.0 + 2.0, 2.0 + 1.0, 7 / 3)
    assert found.to_dict() == {
        "over plain": 2.333, "plain tokens_per_second": 2.86, "tokens_per_second": 6.67, "mean_accept_length": 1.5,
        "tokens_per_round": 2.5, "drafted_per_round": 2.0, "equal answers": "1 of 2",
    }  # fmt: skip


def lookups(ids: list[int]) -> tuple[float, float]:
    """Shares of places whose last two ids came before, and of those at which what followed then follows again."""
    last: dict[tuple[int, int], int] = {}
    found = right = 0
    for place in range(2, len(ids)):
        key = (ids[place - 2], ids[place - 1])
        found += key in last
        right += last.get(key) == ids[place]
        last[key] = ids[place]
    return found / len(ids), right / max(found, 1)


@pytest.mark.parametrize("seed", [0, 1])
def test_lookups_find_something_and_miss(seed: int) -> None:
    found, right = lookups(bench.misses(49152, seed))
    assert found > 0.7 and right < 0.1
    # at the end of the text, where an answer begins, nearly every pair is known
    text = bench.misses(49152, seed)
    known = set(pairwise(text))
    assert len(known) > 0.9 * bench.ALPHABET**2


def test_random_ids_hold_nothing_to_look_up() -> None:
    found, _ = lookups(bench.random_text(49152, 0))
    assert found == 0 and bench.random_text(49152, 0) != bench.random_text(49152, 1)
