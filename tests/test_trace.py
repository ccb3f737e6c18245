"""`pad trace`: every token with its origin, every round with its tree, and files that are whole or not there."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_cli import FIGURES, PROMPT, check_error, pad
from tiny import Make, tiny_engine
from typer.testing import Result

from pad_engine import SamplingParams
from pad_engine.captured import Played
from pad_engine.serving.rounds import emitted_nodes, round_object, token_texts
from pad_engine.state import Commit, Overridden
from pad_engine.tree import UNKNOWN, DraftTree

# whatever is drafted stays, and looking it up costs nothing, so that the controller always drafts
RULE = ("--rule", "typical:eps=0", "--drafter", "ngram:min=1")


@pytest.fixture(scope="module")
def folder(make_model: Make) -> Path:
    return make_model("llama")


def trace(folder: Path, *arguments: str | Path, max_tokens: int = 24) -> Result:
    options = ("--model", folder, "--device", "cpu", "--max-tokens", str(max_tokens), "--ignore-eos", *arguments)
    return pad("trace", *options, "--", PROMPT)


def origins(found: dict[str, Any]) -> list[str]:
    return [token["origin"] for one in found["rounds"] for token in one["emitted"]]


@pytest.mark.parametrize("trees", ["chain", "best-first"])
def test_json_tells_every_round(folder: Path, trees: str) -> None:
    result = trace(folder, *RULE, "--trees", trees, "--json")
    assert result.exit_code == 0 and not result.stderr, result.output
    found = json.loads(result.stdout)
    request, totals = found["request"], found["totals"]
    assert (request["model"], request["rule"], request["lossless"]) == (str(folder), "typical:eps=0", False)
    assert (request["drafter"], request["draft_model"], request["trees"]) == ("ngram:min=1", None, trees)
    assert request["sampling"]["max_tokens"] == 24 and request["sampling"]["seed"] == totals["stats"]["seed"]
    tokens = [token for one in found["rounds"] for token in one["emitted"]]
    assert found["prompt_ids"] == list(PROMPT.encode()) and len(tokens) == 24 == totals["stats"]["completion_tokens"]
    assert "".join(token["text"] for token in tokens) == found["text"]
    for one in found["rounds"]:
        tree = one["tree"]
        assert one["path"][0] == 0 and one["verify_ms"] > 0 <= one["draft_ms"]
        for token, parent in zip(one["emitted"], one["path"], strict=False):
            assert (token["node"] is None) == (token["origin"] == "target")
            assert ("margin" in token) == (token["origin"] == "override")
            if token["node"] is not None:
                assert tree["tokens"][token["node"]] == token["token"] and tree["parents"][token["node"]] == parent
            if token["origin"] == "override":
                assert token["margin"] >= 0 and token["entropy"] > 0 and 0 < token["probability"] <= 0.5
                assert token["pivot_prob"] == 1.0
    counts = totals["origins"]
    assert counts == {name: origins(found).count(name) for name in ("draft", "override", "target")}
    assert counts["override"] == totals["stats"]["overrides"] > 0
    assert counts["draft"] + counts["override"] == totals["stats"]["accepted_tokens"]
    assert totals["verify_ms"] == pytest.approx(sum(one["verify_ms"] for one in found["rounds"]))


def test_a_file_and_a_view_of_the_text(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    result = trace(folder, *RULE, "--out", out)
    found = json.loads(out.read_text())
    assert result.exit_code == 0, result.output
    assert list(tmp_path.iterdir()) == [out] and len(origins(found)) == 24
    assert result.stdout.startswith(found["text"].split("\n")[0][:3])
    *_, line = result.stderr.splitlines()
    match = FIGURES.fullmatch(line)
    counts = ", ".join(f"{count} {name}" for name, count in found["totals"]["origins"].items())
    assert match and match[1] == "24" and match[3] == f"; rule typical:eps=0: {counts}"
    for name in ("draft", "override", "target"):
        assert f"\n{name}: " in result.stdout


def test_a_lossless_rule_has_no_overrides(folder: Path) -> None:
    found = json.loads(trace(folder, "--json", "--temperature", "0.8", "--seed", "7").stdout)
    expected = tiny_engine(folder, "none").generate(PROMPT, SamplingParams(24, 0.8, 7, ignore_eos=True))
    assert found["text"] == expected.text and "override" not in origins(found)
    assert (found["request"]["rule"], found["request"]["lossless"]) == ("match", True)


def test_a_stop_text_cuts_the_last_tokens(folder: Path) -> None:
    text = json.loads(trace(folder, "--json").stdout)["text"]
    found = json.loads(trace(folder, "--stop", text[7:9], "--json").stdout)
    end = text.index(text[7:9])
    assert found["text"] == text[:end] and found["finish_reason"] == "stop"
    assert "".join(token["text"] for one in found["rounds"] for token in one["emitted"]) == text[:end]


def test_tokens_inside_a_character_have_no_text(folder: Path) -> None:
    tokenizer, ids = tiny_engine(folder).tokenizer, [*"aé€".encode(), 0xE2]
    assert token_texts(tokenizer, ids, "aé€\ufffd") == ["a", "", "é", "", "", "€", "\ufffd"]
    assert token_texts(tokenizer, ids, "aé") == ["a", "", "é", "", "", "", ""]
    assert token_texts(tokenizer, [], "") == []


def test_the_node_of_a_last_drafted_token() -> None:
    """The row of an answer's last token is not kept, so the path ends before it."""
    tree = DraftTree([5, 6, 7, 7], [-1, 0, 1, 1])
    kept = Overridden(3, float("inf"), 0.5, 0.25, 1.0)
    for overridden, node in (((), 2), ((kept,), 3)):
        commit = Commit(tree, [0, 1], [6, 7], 2, overridden)
        assert emitted_nodes(commit) == [1, node]
        last = round_object(Played(commit, None, 0.0, 1.0, 1), ["a", "b"])["emitted"][-1]
        assert last["origin"] == ("override" if overridden else "draft")
        assert not overridden or (last["margin"], last["entropy"]) == (None, 0.5)
    assert emitted_nodes(Commit(tree, [0, 1, 2], [6, 7, 9], 2)) == [1, 2, None]
    assert emitted_nodes(Commit(tree, [0], [9], 0)) == [None]


def test_a_token_that_stayed_on_the_device_is_null() -> None:
    commit = Commit(DraftTree.chain([5, 6, UNKNOWN]), [0, 1], [6, 9], 1)
    assert round_object(Played(commit, None, 0.0, 1.0, 1), ["a", "b"])["tree"]["tokens"] == [5, 6, None]


def test_bad_places_are_refused_before_a_model_is_looked_for(tmp_path: Path) -> None:
    missing, model = tmp_path / "no" / "trace.json", Path("/no/such/model")
    check_error(trace(model, "--out", missing), 2, "cannot be written: there is no folder", str(missing.parent))
    check_error(trace(model, "--out", tmp_path), 2, "is a folder, expected a file")
    (tmp_path / "file").write_text("")
    check_error(trace(model, "--out", tmp_path / "file" / "trace.json"), 2, "there is no folder")
    check_error(trace(model, "--rule", "lucky"), 2, "rule must be one of")


def test_a_file_that_cannot_be_finished_leaves_the_old_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "trace.json"
    out.write_text("old")

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    result = trace(folder, "--out", out, "--json")
    check_error(result, 1, "cannot be written: No space left on device")
    assert out.read_text() == "old" and list(tmp_path.iterdir()) == [out]
