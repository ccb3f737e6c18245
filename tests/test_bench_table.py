"""The README's table of GPU figures is the one that the result files give."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_table", ROOT / "bench" / "table.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(folder: Path, name: str, content: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Two cards, one of them measured in part, and a folder without any figure of the table."""
    root = tmp_path / "results"
    step: dict[str, Any] = {"plain": {"ms": 5.1, "over_limit": 1.07}, "memory_mb": {"reserved_beyond": 312.4}}
    tree, chain = ({"nodes": 16, "form": form, "over_limit": ratio} for form, ratio in (("tree", 9.0), ("chain", 1.1)))
    step["verify"] = [tree, chain]
    step["tail_us"] = {"greedy": {"us": 8.0}, "match": {"us": 12.5}}
    step["host_share"] = {"plain, run ahead": {"share": 0.004}}
    write(root / "h100", "step-8b", step)
    write(root / "h100", "kv", {"kv": [{"nodes": 1, "share": 0.79}, {"nodes": 64, "share": 0.4}]})
    drafted = [{"depth": 4, "temperature": t, "tokens_per_second": rate} for t, rate in ((1.0, 300.0), (0.0, 371.4))]
    write(root / "h200", "round-8b-1b", {"draft": {"step_over_plain": 1.031}, "drafted": drafted})
    groups = {"drafters": {"ngram": {"least over plain": 0.97}}}
    write(root / "h200", "generate-smollm2-135m-cuda-bfloat16", groups)
    write(root / "h200", "prefill", {"prefill": {"over_transformers": 0.95}})
    write(root / "cpu", "linear", {})
    return root


def test_the_readme_is_up_to_date(table: ModuleType) -> None:
    assert table.main(["--check"]) == 0


def test_rows_are_what_was_measured(table: ModuleType, results: Path) -> None:
    assert table.table(results).splitlines() == [
        "| card | figure | measured | target | |",
        "|---|---|---|---|---|",
        "| h100 | plain step, 8B shape | 1.070x limit | at most 1.060x limit | missed |",
        "| h100 | verify 16 nodes, 8B shape | 1.100x limit | at most 1.130x limit | met |",
        "| h100 | tail of 16 nodes, greedy, 8B shape | 8.0 us | at most 10.0 us | met |",
        "| h100 | tail of 16 nodes, match, 8B shape | 12.5 us | at most 10.0 us | missed |",
        "| h100 | host share, plain rounds, 8B shape | 0.4% | at most 2.0% | met |",
        "| h100 | KV reading at 32k, 1 node, of read rate | 79.0% | at least 80.0% | missed |",
        "| h100 | KV reading at 32k, 64 nodes | 40.0% | reported | - |",
        "| h100 | memory beyond weights and cache, 8B shape | 312 MB | at most 500 MB | met |",
        "| h200 | prefill of 2,048 tokens, 8B shape, speed over transformers | 0.95x | at least 0.90x | met |",
        "| h200 | one draft step in the loop over a plain one, 1B shape | 1.031x | at most 1.020x | missed |",
        "| h200 | 8B + 1B draft, K = 4, forced to 3.5 tokens a round | 371 tokens/s | at least 370 tokens/s | met |",
        "| h200 | ngram over plain, SmolLM2, worst group | 0.97x | at least 0.98x | missed |",
    ]


def test_the_table_is_written_between_its_comments(table: ModuleType, results: Path, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("before\n\n<!-- figures -->\nold\n<!-- /figures -->\n\nafter\n")
    arguments = ["--results", str(results), "--readme", str(readme)]
    assert table.main([*arguments, "--check"]) == 1
    assert "old" in readme.read_text()
    assert table.main(arguments) == 0
    text = readme.read_text()
    assert text.startswith("before\n\n<!-- figures -->\n| card |") and text.endswith("\n<!-- /figures -->\n\nafter\n")
    assert "old" not in text and table.main([*arguments, "--check"]) == 0


def test_without_results_or_comments(table: ModuleType, tmp_path: Path) -> None:
    assert table.table(tmp_path) == table.NOTHING
    with pytest.raises(ValueError, match="to write the table between"):
        table.with_table("no comments", "| |")


def test_names_are_distinct(table: ModuleType) -> None:
    names = [figure.name for figure in table.FIGURES]
    assert len(names) == len(set(names))
