"""bench/bench_context.py: every pair of context and nodes has a line, at the context that it names."""

import pytest
import torch
from benches import bench_module
from launches import DEVICE

bench, rig = bench_module("bench_context"), bench_module("rig")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def test_every_pair_is_timed_at_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pad_engine.kernels.linear.can_pack", lambda weight: False)
    for name in ("TURNS", "WARM"):
        monkeypatch.setattr(bench, name, 1)
    decoder = rig.random_decoder("tiny", DEVICE, torch.float32, 32)
    one = rig.Rig("tiny", length=32, device=DEVICE, decoder=decoder)
    lengths = []

    def busy_ms(queue, count, warm):
        lengths.append(int(one.rounds.requests.cache_len[0]))
        return float(count)

    monkeypatch.setattr(bench.harness, "busy_ms", busy_ms)
    with torch.inference_mode():
        rows = [row for context in (5, 9) for row in bench.measure(one, context, [1, 3], 7, read_rate=1.0)]
    assert [(row["context"], row["nodes"]) for row in rows] == [(5, 1), (5, 3), (9, 1), (9, 3)]
    assert lengths == [5, 5, 9, 9] and all(row["ms"] == 7.0 for row in rows)
    longer, shorter = rows[2]["over_limit"], rows[0]["over_limit"]
    assert longer < shorter, "keys and values of a longer context raise the limit"
