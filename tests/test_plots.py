"""bench/plots.py draws what was measured, and nothing of what was not."""

import json
from pathlib import Path
from typing import Any

import pytest
from benches import bench_module

bench = bench_module("plots")
ENVIRONMENT = {"card": "Card", "processor": "x", "torch": "2.11.0", "commit": "abc"}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Two cards: one with a step and peers, one with a context."""
    step: dict[str, Any] = {"shape": "1b", "limit_ms": 0.797, "plain": {"ms": 0.936, "over_limit": 1.17}}
    step["verify"] = [{"nodes": 16, "form": form, "over_limit": of} for form, of in (("tree", 9.0), ("chain", 1.4))]
    peers = {"pad plain": {"tokens_per_second": 321.0}, "other": {"tokens_per_second": 45.0}, "late": {"error": "no"}}
    rounds = [{"context": c, "nodes": n, "ms": c / 128 + n} for c in (128, 512) for n in (1, 4)]
    for card, name, content in (
        ("h1", "step-1b", step),
        ("h1", "peers-small", {"model": "small", "peers": peers}),
        ("h2", "context-8b", {"shape": "8b", "rounds": rounds}),
        ("h2", "linear", {}),
    ):
        (tmp_path / card).mkdir(exist_ok=True)
        (tmp_path / card / f"{name}.json").write_text(json.dumps(content | {"environment": ENVIRONMENT}))
    return tmp_path


def test_a_card_has_the_plots_of_its_results(results: Path) -> None:
    assert list(bench.plots_of(bench.load(results / "h1"))) == ["steps", "nodes", "peers-small"]
    assert list(bench.plots_of(bench.load(results / "h2"))) == ["context-8b"]
    assert bench.machine(bench.load(results / "h1")) == "Card, torch 2.11.0, commit abc"


def drawn(results: Path, card: str, name: str) -> Any:
    """The axes of a plot."""
    figure = pytest.importorskip("matplotlib.figure", reason="matplotlib is not installed: no plot was tested")
    draw, chosen = bench.plots_of(bench.load(results / card))[name]
    axes = figure.Figure().subplots()
    draw(axes, chosen)
    return axes


def test_numbers_are_those_of_the_results(results: Path) -> None:
    assert [line.get_ydata() for line in drawn(results, "h1", "steps").lines] == [[0.797], [0.936]]
    (line, _) = drawn(results, "h1", "nodes").lines
    assert line.get_xydata().tolist() == [[1, 1.17], [16, 1.4]]
    peers = drawn(results, "h1", "peers-small")
    assert [bar.get_width() for bar in peers.patches] == [45.0, 321.0]
    assert [label.get_text() for label in peers.get_yticklabels()] == ["other", "pad plain"]
    plain, tree = drawn(results, "h2", "context-8b").lines
    assert plain.get_xydata().tolist() == [[128, 2.0], [512, 5.0]] and tree.get_label() == "4 nodes"


def test_files_are_written_the_same_twice(results: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: no plot was written")
    for out in ("one", "two"):
        bench.main(["--results", str(results), "--out", str(tmp_path / out)])
    names = ["h1-nodes.svg", "h1-peers-small.svg", "h1-steps.svg", "h2-context-8b.svg"]
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == names
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
        assert "Card, torch 2.11.0" in (tmp_path / "one" / name).read_text()
