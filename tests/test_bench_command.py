"""`pad bench`: its table, its JSON, and what it refuses."""

import json
from pathlib import Path

import pytest
from tiny import Make
from typer.testing import CliRunner, Result

from pad_engine.serving.bench import PROMPTS
from pad_engine.serving.cli import app


@pytest.fixture(scope="module")
def folder(make_model: Make) -> Path:
    return make_model("llama")


def bench(folder: Path, *arguments: str) -> Result:
    options = ["bench", "--model", str(folder), "--device", "cpu", "--tokens", "12", *arguments]
    return CliRunner().invoke(app, options)


def test_json_has_a_row_for_each_prompt_and_for_all(folder: Path) -> None:
    result = bench(folder, "--json", "--drafter", "ngram:min=1")
    assert result.exit_code == 0, result.output
    out = json.loads(result.stdout)
    assert [row["prompt"] for row in out["prompts"]] == list(PROMPTS) and out["all"]["prompt"] == "all"
    assert (out["model"], out["drafter"], out["tokens"]) == (str(folder), "ngram:min=1", 12)
    assert (out["device"], out["dtype"], out["machine"]["python"][:2]) == ("cpu", "float32", "3.")
    for row in [*out["prompts"], out["all"]]:
        assert row["same_tokens"] is True
        assert 0 < row["prefill_ms"] < row["first_token_ms"]
        assert row["plain_step_ms"] == pytest.approx(1000 / row["plain_tokens_per_second"])
        assert row["over_plain"] == pytest.approx(row["tokens_per_second"] / row["plain_tokens_per_second"])
        assert row["tokens_per_round"] >= 1 and row["mean_accept_length"] >= 0
    assert out["all"]["rounds"] == sum(row["rounds"] for row in out["prompts"])
    # what does not fit beside the new tokens is left out
    assert max(row["prompt_tokens"] for row in out["prompts"]) == 256 - 12
    assert not result.stderr


def test_a_table_is_shown(folder: Path) -> None:
    result = bench(folder, "--temperature", "0.8", "--draft-model", "self:drop=1")
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines() if line.strip()]
    assert lines[0][-5:] == ["drafter", "draft-model,", "float32", "on", "cpu"]
    shown = {words[0]: words for words in lines if words[0] in {*PROMPTS, "all"}}
    assert shown.keys() == {*PROMPTS, "all"} and all(words[-1] == "yes" for words in shown.values())
    assert result.stderr.startswith("memory: ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--tokens", "255"), "255 new tokens and a prompt do not fit a context of 256"),
        (("--temperature", "-1"), "temperature"),
        (("--drafter", "oracle"), "drafter must be"),
        (("--drafter", "draft-model"), "needs --draft-model"),
        (("--device", "tpu"), "device"),
        (("--max-length", "9999"), "max_length must be in [2, 256]"),
    ],
)
def test_bad_options_are_bad_usage(folder: Path, arguments: tuple[str, ...], words: str) -> None:
    result = bench(folder, "--json", *arguments)
    assert result.exit_code == 2 and words in result.stderr and not result.stdout
