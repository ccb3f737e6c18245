"""bench/dear_drafts.py: drafts that are dear and right are made, and those that are wrong cost little."""

from statistics import harmonic_mean

from benches import bench_module

bench = bench_module("dear_drafts")


def test_dear_drafts_that_pay_are_made_and_others_are_not() -> None:
    over = {name: harmonic_mean(bench.speeds(case, 49)) for name, case in bench.CASES.items()}
    assert all((0.97 < one < 1.0) == ("mostly wrong" in name) for name, one in over.items()), over
    assert min(over["8b + 1b, mostly right"], over["8b + 1b, mostly right, slow at first"]) > 2
    assert over["8b + 1b, the answer's first six wrong"] > 1.5


def test_what_is_right_at_which_place() -> None:
    case = bench.Case(*bench.PAIR_1B, right=1.0, every=5, wrong=2)
    draw = bench.random.Random(0)
    assert [bench.kept(case, 4, emitted, draw) for emitted in range(6)] == [0, 0, 3, 2, 1, 0]
