"""The benchmark of whole rounds measures what it says, on a tiny shape in Triton's interpreter."""

import pytest
import torch
from benches import bench_module
from tiny import CPU

bench, parts, forced, rig = map(bench_module, ("bench_round", "round_parts", "forced", "rig"))
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels read weights as they are, not as a CPU's library packs them; contexts and repeats are few."""
    monkeypatch.setattr("pad_engine.kernels.linear.can_pack", lambda weight: False)
    monkeypatch.setattr(parts, "CONTEXT", 6)
    monkeypatch.setattr(parts, "TURNS", 1)
    monkeypatch.setattr(bench, "TEMPERATURES", (0.0,))
    monkeypatch.setattr(bench, "LENGTH", 64)


def test_a_request_must_have_the_known_answer_and_the_forced_rounds() -> None:
    target, draft, lengths = forced.pair("tiny", "tiny", None, 3.5, 4, 64, CPU, torch.float32)
    engine = rig.engine_on(target, parts.drafter_of(draft, 4), 4, fused=False)
    found = parts.request(engine, lengths, 30, 0.0)
    assert (found["tokens"], found["rounds"], found["tokens_per_round"]) == (28, 8, 3.5)
    assert found["tokens_per_second"] == pytest.approx(1000 / found["ms_per_token"], rel=0.01)
    with pytest.raises(AssertionError, match=r"3\.\d+ tokens a round, asked 5"):
        parts.request(engine, [5], 30, 0.0)
    engine.target = rig.random_decoder("tiny", CPU, torch.float32, 64)
    with pytest.raises(AssertionError, match="not the known one"):
        parts.request(engine, lengths, 30, 0.0)


@pytest.mark.slow
def test_a_pair_is_measured() -> None:
    size = parts.Size(replays=1, rounds=1, tokens=7)
    with torch.inference_mode():
        found = bench.measure("tiny+tiny", 3.5, [4], [4], size, CPU, torch.float32)
    (drafted,), (row,), (plain,) = found["drafted"], found["budgets"], found["plain_requests"]
    assert (drafted["tokens"], drafted["rounds"], drafted["tokens_per_round"]) == (7, 2, 3.5)
    assert (plain["tokens"], plain["rounds"]) == (1, 1)
    assert found["draft"]["ms_by_depth"].keys() == {1, 2, 4}
    assert row["nodes"] == 4 and row["round_ms"] > 0
    assert drafted["over_parts"] == pytest.approx(
        drafted["tokens_per_second"] * sum(drafted["parts_ms"].values()) / 3500, rel=0.01
    )


def test_pairs_are_parsed() -> None:
    assert bench.parse_pair("8b+1b") == ("8b", "1b", None) and bench.parse_pair("1b+1b:4") == ("1b", "1b", 4)
    for wrong in ("8b", "1b+1b:x"):
        with pytest.raises(ValueError, match="TARGET\\+DRAFT"):
            bench.parse_pair(wrong)
