"""bench/bench_cold.py: what of a start is the engine's own, also of a run that was stopped between two starts."""

from benches import bench_module

bench = bench_module("bench_cold")


def test_starts_are_told_apart_and_summed() -> None:
    parts = [{"torch": 3.0, "weights": 1.0, "engine": own, "first token": 0.5} for own in (9.0, 2.0, 1.0, 4.0)]
    assert bench.result(parts[:1])["seconds"] == {"not_cached": 9.5}
    found = bench.result(parts)
    assert found["seconds"] == {"not_cached": 9.5, "cached": 2.5}
    assert found["parts"] == {"not_cached": parts[0], "cached": parts[1:]}
