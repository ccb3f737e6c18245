"""The benchmark of whole rounds measures what it says, on a tiny shape in Triton's interpreter."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benches import bench_module
from launches import DEVICE
from tiny import CPU
from triton.runtime.interpreter import GridExecutor

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
        measured = bench.parts_of("tiny+tiny", 3.5, [4], [1, 4], size, DEVICE, torch.float32, 1.0, draft_vocab=24)
        found = {name: measure({}) for (name,), measure in measured.items()}
    (drafted,), (root, row), (plain,) = found["drafted"], found["budgets"], found["plain_requests"]
    assert (drafted["tokens"], drafted["rounds"], drafted["tokens_per_round"]) == (7, 2, 3.5)
    assert (plain["tokens"], plain["rounds"]) == (1, 1)
    draft, target = found["draft"], found["plain"]["target"]
    assert draft["ms_by_depth"].keys() == {"1", "2", "4"}
    assert draft["step_over_plain"] == pytest.approx(draft["step_ms"] / draft["plain_ms"], rel=0.01)
    few = found["few_tokens"]
    assert few["tokens"] == 24 and few["ms_by_depth"].keys() == {"1", "2", "4"}
    assert (few["head_bytes"], few["whole_head_bytes"]) == (24 * 32 * 4, 96 * 32 * 4)
    assert target["over_limit"] == pytest.approx(target["ms"] / target["limit_ms"], rel=0.1)
    assert (root["nodes"], row["nodes"]) == (1, 4) and root["round_ms"] > 0 < row["round_ms"]
    assert drafted["over_parts"] == pytest.approx(
        drafted["tokens_per_second"] * sum(drafted["parts_ms"].values()) / 3500, rel=0.01
    )


class Recorded:
    """The variants of kernels that Triton's interpreter is asked for: names, with what they are compiled for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.variants: set[tuple[str, str]] = set()
        launch = GridExecutor.__call__

        def recorded(executor: Any, *args: Any, **options: Any) -> Any:
            given = dict(zip(executor.arg_names, args, strict=False)) | options
            found = {name: self.kind(value, name in executor.constexprs) for name, value in given.items()}
            self.variants.add((executor.fn.__name__, repr(sorted(found.items()))))
            return launch(executor, *args, **options)

        monkeypatch.setattr(GridExecutor, "__call__", recorded)

    def kind(self, value: Any, constant: bool) -> str:
        """Of an argument: a constant's value, a tensor's type, and what Triton looks at of a whole number."""
        if callable(value):
            return str(value.__name__)
        if isinstance(value, torch.Tensor):
            return str(value.dtype)
        divisible = isinstance(value, int) and not constant and value != 1
        return f"divisible: {value % 16 == 0}" if divisible else repr(value)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="counts launches of Triton's interpreter")
def test_all_that_is_measured_was_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "CUDA", CPU)
    monkeypatch.setattr(
        rig, "random_decoder", lambda shape, *_: forced.successor_decoder(shape, CPU, torch.float32, bench.LENGTH)
    )
    size, recorded = parts.Size(replays=1, rounds=1, tokens=7), Recorded(monkeypatch)
    for nodes in (0, 1, 4):
        bench.compile_part(("tiny", nodes, [4], 24))
    ahead = set(recorded.variants)
    with torch.inference_mode():
        for measure in bench.parts_of("tiny+tiny", 3.5, [4], [1, 4], size, CPU, torch.float32, None, 24).values():
            measure({})
    assert len(ahead) > 20 and recorded.variants == ahead


def test_every_number_of_rows_is_compiled_once_for_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = []

    class Pool:
        def __init__(self, workers: int) -> None: ...

        def __enter__(self) -> "Pool":
            return self

        def __exit__(self, *_: object) -> None: ...

        def map(self, function: object, found: list[tuple[str, int, list[int], int | None]], chunksize: int) -> None:
            jobs.extend(found)

    monkeypatch.setattr(bench.multiprocessing, "get_context", lambda _: SimpleNamespace(Pool=Pool))
    bench.compile_all(["8b+1b", "1b+1b:4"], [4], [1, 4, 8, 16, 32, 64], 2)
    assert [(shape, nodes) for shape, nodes, *_ in jobs] == [
        ("1b", 0), ("8b", 1), ("8b", 16), ("8b", 32), ("8b", 64), ("1b", 1), ("1b", 16), ("1b", 32), ("1b", 64)
    ]  # fmt: skip


def test_pairs_are_parsed() -> None:
    assert bench.parse_pair("8b+1b") == ("8b", "1b", None) and bench.parse_pair("1b+1b:4") == ("1b", "1b", 4)
    for wrong in ("8b", "1b+1b:x"):
        with pytest.raises(ValueError, match="TARGET\\+DRAFT"):
            bench.parse_pair(wrong)
