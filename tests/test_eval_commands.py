"""`pad calibrate` and `pad eval` on tiny models: what they print and write, and what they refuse."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from evaluating import Parity
from tiny import Make, random_classifier
from typer.testing import CliRunner, Result

from pad_engine.files import held
from pad_engine.models.digest import model_digest
from pad_engine.rules.classifier import PIVOT_MLP
from pad_engine.serving.cli import app
from pad_engine.training.bounds import upper_bound
from pad_engine.training.evaluate import questions_digest
from pad_engine.training.runner import Runner

TASK = "evaluating:Parity"


@pytest.fixture(scope="module")
def models(make_model: Make) -> list[str]:
    return ["--model", str(make_model("llama")), "--draft-model", str(make_model("llama", noise=0.1))]


@pytest.fixture(scope="module")
def pivot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_classifier(tmp_path_factory.mktemp("pivot"), PIVOT_MLP, 48, 1)


def pad(command: str, models: list[str], *arguments: str | Path) -> Result:
    options = [command, "--task", TASK, *models, "--device", "cpu", "--depth", "4", *map(str, arguments)]
    return CliRunner().invoke(app, options)


def check_error(result: Result, code: int, words: str) -> None:
    assert result.exit_code == code and words in result.stderr and not result.stdout, result.output
    assert "Traceback" not in result.stderr


def test_eval_from_models_to_figures(models: list[str], pivot: Path, tmp_path: Path) -> None:
    """Every setting, every question once; sigma 0 and greedy are the target's ids; a second run decodes nothing."""
    out = tmp_path / "r.jsonl"
    rules = f"greedy; pivot:model={pivot},sigma=0|0.5|1; topk:k=2; random:rate=0.5"
    arguments = ("--rules", rules, "--questions", "8", "--direct", "--time", "2", "--out", out)
    result = pad("eval", models, *arguments, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    by_name = {one["setting"]: one for one in found["settings"]}
    sigma = {value: f"pivot:model={pivot},sigma={value}" for value in ("0", "0.5", "1")}
    relaxed = [*sigma.values(), "topk:k=2", "random:rate=0.5"]
    assert list(by_name) == ["target", "draft", "greedy", *relaxed, *(f"direct {name}" for name in relaxed)]
    for name in ("greedy", sigma["0"], f"direct {sigma['0']}"):
        assert (by_name[name]["same_as_target"], by_name[name]["harms"], by_name[name]["overrides"]) == (8, 0, 0)
    assert by_name["greedy"]["accepted_tokens"] == by_name[sigma["0"]]["accepted_tokens"] > 0
    assert by_name[sigma["1"]]["mean_accept_length"] > by_name["greedy"]["mean_accept_length"]
    assert by_name[sigma["1"]]["overrides"] > 0 and by_name["target"]["tokens_per_round"] == 1.0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert len({(r["setting"], r["question"]) for r in records if "question" in r}) == 13 * 8
    assert all(r["right"] == Parity().utility(*question_of(r)) for r in records if "question" in r)
    assert set(found["speeds"]) == {"target", "draft", "greedy", *relaxed}
    assert all(one["questions"] == 2 and one["tokens_per_second"] > 0 for one in found["speeds"].values())
    assert json.loads((tmp_path / "r.json").read_text()) == found
    before = out.read_bytes()
    again = pad("eval", models, *arguments)
    assert again.exit_code == 0 and out.read_bytes() == before
    assert again.stdout.startswith("| setting | right |") and "target's ids for 8 of 8 questions" in again.stdout
    # more rules may come to the same file, other questions may not
    assert pad("eval", models, "--rules", "topk:k=3", "--questions", "8", "--out", out).exit_code == 0
    other = pad("eval", models, "--rules", "topk", "--questions", "9", "--out", out)
    check_error(other, 1, "begun with questions 8, and this run has 9")


def question_of(record: dict) -> tuple:
    question = next(q for q in Parity().questions("test", 8) if q.id == record["question"])
    return question, record["text"]


def test_calibrate_writes_a_certificate(models: list[str], pivot: Path, tmp_path: Path) -> None:
    """A tiny pair harms much, so nearly all of it is allowed; the figures are those of the answers."""
    out = tmp_path / "c.jsonl"
    arguments = ("--questions", "30", "--max-loss", "0.4", "--confidence", "0.8", "--seed", "1", "--out", out)
    rule = f"pivot:model={pivot}"
    result = pad("calibrate", models, "--rule", rule, "--settings", "0.9,0,0.3", *arguments)
    assert result.exit_code == 0, result.output
    certificate = json.loads((tmp_path / "c.json").read_text())
    assert result.stdout == f"--rule {certificate['rule']}\n"
    tested = certificate["tested"]
    assert [one["setting"] for one in tested] == [0.0, 0.3, 0.9][: len(tested)] and tested[0]["harms"] == 0
    right = {}
    for record in map(json.loads, out.read_text().splitlines()):
        if "question" in record:
            right[record["setting"], record["question"]] = record["right"]
    for one in tested:
        name = f"{rule},sigma={one['setting']:g}"
        harms = sum(ok and not right[name, q] for (setting, q), ok in right.items() if setting == "target")
        assert (one["harms"], one["questions"]) == (harms, 30)
        bound = upper_bound(harms, 30, 0.8)
        assert (one["harm_upper_bound"], one["passed"]) == (bound, bound <= 0.4)
    best = [one for one in tested if one["passed"]][-1]
    assert {key: certificate[key] for key in best} == best and len(certificate["classifier_sha256"]) == 64
    assert (certificate["max_loss"], certificate["confidence"], certificate["results"]) == (0.4, 0.8, "c.jsonl")
    assert certificate["run"]["split"] == "calibration" and certificate["run"]["machine"]["python"]
    # the sequence is fixed beforehand
    other = pad("calibrate", models, "--rule", rule, "--settings", "0,0.3", *arguments)
    check_error(other, 1, "begun with sequence")
    # what was calibrated on is not tested on
    test = pad("eval", models, "--rules", "topk", "--split", "calibration", "--seed", "1", "--questions", "8",
               "--apart", out, "--out", tmp_path / "r.jsonl")  # fmt: skip
    check_error(test, 2, "8 questions of the calibration split were used by")


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the questions that are decoded, by setting."""
    counts: Counter[str] = Counter()
    decode = Runner.decode

    def count(self: Runner, asked: Any) -> Any:
        asked = list(asked)
        counts.update(setting.name for setting, _ in asked)
        return decode(self, asked)

    monkeypatch.setattr(Runner, "decode", count)
    return counts


RUN = ("--questions", "30", "--seed", "1", "--batch", "16")
CALIBRATION = (*RUN, "--rule", "topk", "--settings", "2,3", "--max-loss", "0.6", "--confidence", "0.8")


@pytest.mark.filterwarnings("ignore:lossless speculation itself harms")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_calibrate_takes_answers_over(dtype: str, models: list[str], decoded: Counter[str], tmp_path: Path) -> None:
    """The same file and certificate as by decoding, and nothing decoded of what is there: the target, and greedy where
    rounding is looked at, but not the draft model. What is missing is decoded, and the calibration's own file is whole
    without the other one."""
    base, cut, kind = tmp_path / "base.jsonl", tmp_path / "cut.jsonl", ("--dtype", dtype)
    narrow = ["greedy"] if dtype == "float16" else []
    evaluated = pad("eval", models, *RUN, *kind, "--rules", "greedy", "--split", "calibration", "--out", base)
    assert evaluated.exit_code == 0, evaluated.output

    def calibrated(name: str, *more: str | Path) -> tuple[str, list[str], dict[str, Any], Counter[str]]:
        decoded.clear()
        out = tmp_path / f"{name}.jsonl"
        result = pad("calibrate", models, *CALIBRATION, *kind, *more, "--out", out)
        assert result.exit_code == 0, result.output
        certificate = json.loads(out.with_suffix(".json").read_text()) | {"results": ""}
        return result.stdout, sorted(out.read_text().splitlines()), certificate, +decoded

    *plain, asked = calibrated("a")
    relaxed = {"topk:k=2": 30, "topk:k=3": 30}
    assert asked == {"target": 30, **dict.fromkeys(narrow, 30), **relaxed}
    held = base.read_bytes()
    assert calibrated("b", "--answers", base) == (*plain, relaxed) and base.read_bytes() == held
    assert {json.loads(line).get("setting") for line in plain[1]} == {None, *asked}
    assert calibrated("b") == (*plain, {})
    if not narrow:
        # what a killed run has left: 24 answers of the target, and a line that is not whole
        lines = held.splitlines(keepends=True)
        cut.write_bytes(left := b"".join(lines[:26]) + lines[26][:9])
        assert calibrated("c", "--answers", cut) == (*plain, {"target": 6, **relaxed}) and cut.read_bytes() == left


@pytest.mark.parametrize(
    ("key", "found", "run"),
    [("seed", 2, 1), ("dtype", "bfloat16", "float32"), ("split", "test", "calibration"), ("depth", 9, 4),
     ("max_tokens", 9, 12), ("adapters", ["a"], [])],
)  # fmt: skip
def test_answers_of_another_run_are_refused(
    key: str, found: Any, run: Any, models: list[str], decoded: Counter[str], tmp_path: Path
) -> None:
    """With the first difference, before anything is written."""
    base, out = tmp_path / "base.jsonl", tmp_path / "c.jsonl"
    facts = {"task": TASK, "split": "calibration", "questions": 30, "max_tokens": 12, "model": models[1],
             "adapters": [], "draft_model": models[3], "max_length": 256, "dtype": "float32", "device": "cpu",
             "seed": 1, "depth": 4, "model_digest": model_digest(Path(models[1])), "adapter_digests": [],
             "draft_model_digest": model_digest(Path(models[3])),
             "questions_digest": questions_digest(list(Parity().questions("calibration", 30, 1)))}  # fmt: skip
    base.write_text(json.dumps({"header": facts | {key: found, "machine": {}}}) + "\n")
    arguments = (*CALIBRATION, "--answers", base, "--out", out)
    words = f"base.jsonl was begun with {key} {found!r}, and this run has {run!r}"
    check_error(pad("calibrate", models, *arguments), 2, words)
    assert not out.exists() and not decoded
    # a target that was asked otherwise
    setting = {"setting": "target", "depth": 3, "classifier": None}
    base.write_text("".join(json.dumps(line) + "\n" for line in ({"header": facts}, setting)))
    check_error(pad("calibrate", models, *arguments), 2, "was begun with depth 3, and setting target has 0")
    assert not out.exists() and not decoded


def test_questions_of_the_classifier_are_refused(models: list[str], pivot: Path, tmp_path: Path) -> None:
    card = pivot.with_suffix(".json")
    facts = json.loads(card.read_text())
    try:
        card.write_text(json.dumps(facts | {"questions": ["calibration-0-3", "x"]}))
        out = tmp_path / "c.jsonl"
        options = ("--rule", f"pivot:model={pivot}", "--questions", "30", "--max-loss", "0.2")
        result = pad("calibrate", models, *options, "--out", out)
        check_error(result, 2, "1 questions of the calibration split were used by")
        assert not out.exists()
    finally:
        card.write_text(json.dumps(facts))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--rule", "topk", "--questions", "30"), "149 are needed if none is harmed"),
        (("--rule", "topk:k=2", "--questions", "200"), "k is what is calibrated"),
        (("--rule", "greedy", "--questions", "200"), "no settings from strict to loose"),
        (("--rule", "topk", "--questions", "200", "--settings", "two"), "--settings must be numbers"),
        (("--rule", "topk", "--questions", "200", "--settings", "2.5"), "k must be a whole number"),
        (("--rule", "topk", "--questions", "200"), "has 40 questions in its calibration split, and 200"),
        (("--rule", "topk", "--questions", "200", "--max-loss", "0"), "max-loss must be in (0, 1)"),
        (("--rule", "topk", "--questions", "200", "--out", "results.json"), "--out must end in .jsonl"),
        (("--rule", "topk", "--questions", "30", "--max-loss", "0.3", "--apart", "none.jsonl"), "cannot be read"),
        (("--rule", "topk", "--questions", "30", "--max-loss", "0.3", "--answers", "none.jsonl"), "cannot be read"),
    ],
)
def test_calibrate_refuses_before_it_loads(
    arguments: tuple[str, ...], words: str, models: list[str], tmp_path: Path
) -> None:
    check_error(pad("calibrate", models, "--out", tmp_path / "c.jsonl", *arguments), 2, words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--rules", ";"), "names no rule"),
        (("--rules", "lucky"), "rule must be one of"),
        (("--rules", "margin:theta=2"), "theta must be in"),
        (("--rules", "topk", "--confidence", "1"), "confidence must be in (0, 1)"),
        (("--rules", "topk", "--task", "no.such:thing"), "there is no task"),
        (("--rules", "fly", "--direct"), "judges a token by those after it"),
    ],
)
def test_eval_refuses_bad_usage(arguments: tuple[str, ...], words: str, models: list[str], tmp_path: Path) -> None:
    check_error(pad("eval", models, "--questions", "4", "--out", tmp_path / "r.jsonl", *arguments), 2, words)
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:the target alone has only")
def test_a_rule_that_fails_at_once_leaves_no_certificate(models: list[str], tmp_path: Path) -> None:
    out = tmp_path / "c.jsonl"
    result = pad("calibrate", models, "--rule", "random", "--settings", "1", "--questions", "40", "--max-loss", "0.1",
                 "--out", out)  # fmt: skip
    check_error(result, 1, "nothing can be certified: the strictest setting, 1, harms")
    assert "hint: " in result.stderr and not (tmp_path / "c.json").exists()


@pytest.mark.filterwarnings("ignore:the target alone has only")
def test_a_certificate_names_the_setting_that_failed(models: list[str], tmp_path: Path) -> None:
    """Last, after those that passed; and a later refusal in the same place leaves no certificate of the try before."""
    out = tmp_path / "c.jsonl"
    arguments = ("--rule", "random", "--questions", "40", "--max-loss", "0.1", "--out", out)
    result = pad("calibrate", models, *arguments, "--settings", "0,1")
    certificate = json.loads((tmp_path / "c.json").read_text())
    assert result.exit_code == 0 and result.stdout == "--rule random:rate=0\n" and certificate["setting"] == 0.0
    assert [(one["setting"], one["passed"]) for one in certificate["tested"]] == [(0.0, True), (1.0, False)]
    assert certificate["tested"][1]["harm_upper_bound"] > 0.1 and certificate["rule"] == "random:rate=0"
    out.unlink()
    check_error(pad("calibrate", models, *arguments, "--settings", "1"), 1, "nothing can be certified")
    assert out.exists() and not (tmp_path / "c.json").exists()


def test_a_file_that_another_process_writes_to_is_refused(models: list[str], tmp_path: Path) -> None:
    out, words = tmp_path / "r.jsonl", f"another process writes to {tmp_path / 'r.jsonl'}"
    with held(out):
        check_error(pad("eval", models, "--rules", "topk", "--questions", "4", "--out", out), 1, words)
        check_error(pad("calibrate", models, *CALIBRATION, "--out", out), 1, words)
        assert not out.exists()
    assert not list(tmp_path.iterdir())
