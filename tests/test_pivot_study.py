"""The study of pivots in one call: its commands, their order, and its figures, on tiny pairs."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from benches import BENCH, bench_module
from evaluating import answered
from test_lora import write_adapter
from tiny import Make
from typer.testing import CliRunner

from pad_engine.serving.cli import app
from pad_engine.training.bounds import upper_bound
from pad_engine.training.results import Results

jobs, study, summary = (bench_module(name) for name in ("jobs", "pivot_study", "pivot_summary"))
HERE = Path(__file__).parent
TASK = "evaluating:Parity"
OPTIONS = [
    "--only", "mixed", "--questions", "30", "--label-questions", "40", "--label-shards", "2", "--max-loss", "0.25",
    "--confidence", "0.8", "--tap-layers", "0,1", "--depth", "4", "--batch", "8", "--time", "2", "--device", "cpu",
]  # fmt: skip


@pytest.fixture
def call(make_model: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options of a tiny study whose target answers every other question rightly, and whose drafter often agrees."""
    pairs = tmp_path / "pairs"
    pairs.mkdir()
    (pairs / "drafter-mixed").symlink_to(make_model("llama", noise=0.1))
    key = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{key}.lora_A.weight": torch.ones(2, 48), f"{key}.lora_B.weight": torch.zeros(48, 2)}
    write_adapter(pairs / "target", tensors)
    monkeypatch.setitem(study.TASKS, "mixed", TASK)
    # of few questions the seed decides what can be certified
    monkeypatch.setattr(study, "SEEDS", {"train": 1, "calibration": 2, "test": 3})
    monkeypatch.chdir(tmp_path)
    return ["--pairs-dir", "pairs", "--out", str(tmp_path / "results"), "--work", "work",
            "--model", str(make_model("llama")), *OPTIONS]  # fmt: skip


class InProcess:
    """`pad` without another process: over when it has begun. ran: the commands so far."""

    ran: ClassVar[list[str]] = []

    def __init__(self, command: Sequence[str], stdout: Any, **_: Any) -> None:
        self.ran.append(command[len(jobs.PAD)])
        result = CliRunner().invoke(app, command[len(jobs.PAD) :])
        stdout.write(result.output.encode())
        self.code = result.exit_code

    def poll(self) -> int:
        return self.code


# typical as loose as this keeps nearly everything, and does harm at once
VALUES = {"unfloored": (0.05, 0.3), "pivot": (0.05, 0.3), "gap": (0.05, 0.3), "typical": (0.002, 0.001)}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Four rules of few settings, in this process; gives the commands that run."""
    monkeypatch.setattr(jobs, "Popen", InProcess)
    monkeypatch.setattr(study, "RULES", {name: replace(study.RULES[name], settings=VALUES[name]) for name in VALUES})
    InProcess.ran.clear()
    return InProcess.ran


@pytest.mark.filterwarnings("ignore:the target alone has only")
def test_the_whole_study(call: list[str], quick: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From labels to figures, whose numbers are those of the answers; that a rule cannot be certified is a result as
    well; a second call runs nothing."""
    code = study.main(["all", *call])
    out = capsys.readouterr().out
    assert code == 0 and out.endswith("\ndone\n"), out
    assert sorted(quick) == ["calibrate"] * 4 + ["eval"] * 10 + ["label"] * 2 + ["merge-labels", "train"]
    text = Path("results/pivot-mixed.json").read_text()
    found, base = json.loads(text), Path("work/base-mixed.jsonl").read_bytes()
    assert str(tmp_path) not in text and str(tmp_path.parent) not in text and "work/" not in text
    by_name = {one["setting"]: one for one in found["settings"]}
    certified = found["certified"]
    assert certified["typical"]["none"].startswith("nothing can be certified: the strictest setting, 0.002, harms")
    assert "| typical: nothing can be certified" in out
    for name in ("pivot", "unfloored", "gap"):
        lines = Path(f"work/test-mixed-{name}.jsonl").read_bytes()
        assert lines.startswith(base) and Path(f"work/sweep-mixed-{name}.jsonl").read_bytes().startswith(base)
        spec = certified[name]["rule"]
        assert {spec, f"direct {spec}"} <= by_name.keys() and f"| {spec} |" in out
        one, path = by_name[spec], Path("work/pivot-mixed.safetensors")
        right = {(r["setting"].replace(str(path), path.name), r["question"]): r["right"]
                 for r in map(json.loads, lines.splitlines()) if "question" in r}  # fmt: skip
        harms = sum(
            ok and not right[spec, question] for (setting, question), ok in right.items() if setting == "target"
        )
        assert (one["harms"], one["harm_upper_bound"]) == (harms, upper_bound(harms, 30, 0.8))
        assert found["speeds"][spec]["questions"] == found["speeds"]["target"]["questions"] == 2
    sigma = {value: by_name[f"pivot:model=pivot-mixed.safetensors,sigma={value}"] for value in ("0", "1")}
    greedy = by_name["greedy"]
    assert (sigma["0"]["harms"], sigma["0"]["overrides"]) == (greedy["harms"], 0)
    same = found["greedy_as_target"]
    assert same == sigma["0"]["same_as_target"] == greedy["same_as_target"] > 20 and found["run"]["dtype"] == "float16"
    assert f"ids for {same} questions and harms {greedy['harms']}, by rounding in float16 alone." in out
    assert sigma["1"]["mean_accept_length"] > by_name["greedy"]["mean_accept_length"]
    assert "pivot:model=pivot-mixed.safetensors,sigma=0.5" in found["speeds"]
    pivot = "pivot:model=pivot-mixed.safetensors"
    assert list(found["families"]) == [f"{pivot},floor=0", pivot, "margin:form=gap", "typical:delta=1"]
    assert [len(sweep) for sweep in found["families"].values()] == [4, 4, 2, 2]
    # the same of the questions to calibrate on, whole settings only
    calibration = {one["setting"]: one for one in found["calibration"]["settings"]}
    tested = certified["gap"]["tested"][0]
    assert calibration[f"margin:form=gap,m={tested['setting']:g}"]["harms"] == tested["harms"]
    assert list(found["calibration"]["families"]) == list(found["families"])
    assert list(found["calibration"]) == ["settings", "families", "equal", "falls"]
    for questions, curves in (("test", found), ("calibration", found["calibration"])):
        line = f"On the {questions} questions, rate of harm at equal numbers"
        assert (line in out) == bool(curves["equal"])
    assert found["equal"]
    assert found["labels"]["questions"] == 40 and found["labels"]["labels"] > found["labels"]["pivots"] > 0
    assert found["classifier"]["tap_layer"] in (0, 1)
    assert found["commands"]["calibrate-mixed-gap"].startswith("pad calibrate --task evaluating:Parity --model ")
    # what was decoded of the target once is in every calibration
    shared = answers_in("base-calibration-mixed")
    assert sorted(shared) == ["draft", "greedy", "target"] and "calibration-2-29" in shared["target"]
    for name in VALUES:
        calibrated = answers_in(f"calibrate-mixed-{name}")
        assert all(calibrated[setting] == shared[setting] for setting in ("target", "greedy"))
        assert "draft" not in calibrated
    quick.clear()
    assert study.main(["all", *call]) == 0 and not quick
    assert "label-mixed-2: done before" in capsys.readouterr().out


def answers_in(name: str) -> dict[str, Any]:
    """By setting and question, of a file in the work folder."""
    return Results(Path(f"work/{name}.jsonl")).answers


def test_what_fails_is_a_line_and_is_tried_again(
    call: list[str], quick: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a drafter there are no figures, and none are made up."""
    Path("pairs/drafter-mixed").unlink()
    assert study.main(["all", *call]) == study.main(["label", *call]) == 1
    out = capsys.readouterr().out
    # what needs no labels is tried all the same
    assert quick == ["label", "label", "eval", "eval", "label", "label"]
    assert out.count("label-mixed-1: failed with exit code 1: error: ") == 4
    assert "jobs are left: label-mixed, train-mixed, calibrate-mixed-unfloored," in out
    assert "mixed: no summary, as base-mixed is not" in out
    assert not Path("results").exists()


def test_a_certificate_counts_once_its_calibration_is_done(call: list[str]) -> None:
    """One of an earlier call, or of a calibration that was killed or refused since, is none."""
    one = study.Study("mixed", study.parse(["eval", *call]))
    Path("work").mkdir()
    Path("work/calibrate-mixed-gap.json").write_text('{"rule": "margin:form=gap,m=0.1"}')
    assert one.certified("gap") is None and one.eval("gap") == "nothing certified"
    for outcome, spec in (("nothing can be certified: ...", None), (jobs.DONE, "margin:form=gap,m=0.1")):
        jobs.write_mark(Path("work"), "calibrate-mixed-gap", jobs.Mark(outcome, ["calibrate"]))
        assert one.certified("gap") == spec


def test_settings_go_from_strict_to_loose_and_seeds_are_fresh(call: list[str]) -> None:
    """The order of a calibration is fixed, and its settings are the sweep's own; no seed is that of pairs.py."""
    one = study.Study("mixed", study.parse(["calibrate", *call]))
    for name, rule in study.RULES.items():
        rising = study.sweep_of(one.rule(name)).rising
        assert list(rule.settings) == sorted(set(rule.settings), reverse=not rising), name
        asked = one.calibrate(name)
        assert tuple(map(float, asked[asked.index("--settings") + 1].split(","))) == rule.settings
        Path("work").mkdir(exist_ok=True)
        Path("work/base-mixed.jsonl").touch()
        sweep = one.sweep(name)
        swept = sweep[sweep.index("--rules") + 1].split(";")
        assert sorted(swept) == sorted(one.spec(name, value) for value in (*rule.settings, *rule.ends))
    assert study.RULES["pivot"].ends == (0.0, 1.0)
    assert len(set(study.SEEDS.values())) == 3 and max(study.SEEDS.values()) < bench_module("pairs").DATA_SEED


def test_the_classifier_comes_first() -> None:
    """Its chain, of all pairs, then every other job by stage; a pair's labels are made in shards, which are put
    together before they are used."""
    options = ["--pairs-dir", "p", "--out", "r", "--work", "w", "--label-shards", "3", "--only", "easy", "mixed"]
    args = study.parse(["all", *options])
    every = study.in_order([study.Study(pair, args) for pair in args.only], study.STAGES)
    shards = [f"label-{pair}{part}" for pair in args.only for part in ("-1", "-2", "-3", "")]
    chain = shards + [f"{kind}-{pair}" for kind in ("train", "base-calibration") for pair in args.only]
    chain += [f"{kind}-{pair}-unfloored" for kind in ("calibrate", "eval") for pair in args.only]
    names = [job.name for job in every]
    assert names[: len(chain)] == chain and len(set(names)) == len(names)
    rest = [name for stage in study.STAGES for name in names if name.startswith(stage) and name not in chain]
    assert names[len(chain) :] == rest and rest[:2] == ["base-easy", "base-mixed"]
    swept = [name.endswith(study.TRAINED) for name in names if name.startswith("sweep")]
    assert swept == sorted(swept, reverse=True) and sum(swept) == 4
    by_name = {job.name: job for job in every}
    assert by_name["sweep-easy-pivot"].needs == ("base-easy", "train-easy")
    assert by_name["calibrate-easy-pivot"].needs == ("base-calibration-easy", "train-easy")
    assert by_name["calibrate-easy-gap"].needs == ("base-calibration-easy",)
    merge = by_name["label-easy"]
    commands = [by_name[name].command() for name in merge.needs]
    assert [command[command.index("--shard") + 1] for command in commands] == ["1/3", "2/3", "3/3"]
    files = [command[command.index("--out") + 1] for command in commands]
    assert merge.command() == ["merge-labels", "w/label-easy.jsonl", *files]
    assert by_name["train-easy"].needs == ("label-easy",) and by_name["train-easy"].command()[2] == "w/label-easy.jsonl"


def test_figures_come_from_the_answers(tmp_path: Path) -> None:
    """An unfinished setting has no figure; a curve is compared at the other one's overrides."""
    args = study.parse(["summary", "--pairs-dir", "p", "--out", str(tmp_path / "r"), "--work", str(tmp_path)])
    header = {"questions": 4, "task": "t", "dtype": "float32", "machine": {"cache": "/root", "gpus": []}}
    base = Results(tmp_path / "base-hard.jsonl", header)
    given = {"target": [1, 1, 1, 1], "draft": [0, 0, 0, 0], "greedy": [1, 1, 1, 1]}
    fill(base, {name: answered(name, right) for name, right in given.items()})
    for name, m, right, count in (("test-hard-gap", 0.2, [1, 0, 1, 0], 4), ("sweep-hard-gap", 0.1, [1, 1, 1, 0], 2)):
        spec = f"margin:form=gap,m={m}"
        fill(Results(tmp_path / f"{name}.jsonl", header), {spec: answered(spec, right, overrides=count)})
    chance = Results(tmp_path / "test-hard-random.jsonl", header)
    fill(chance, {"random:rate=0.1": answered("random:rate=0.1", [0, 0, 0, 0], overrides=4)})
    fill(chance, {"random:rate=0.2": answered("random:rate=0.2", [0, 0, 0], overrides=4)})
    summary.summarise("hard", ["gap", "random"], study.SEEDS, args)
    found = json.loads((tmp_path / "r" / "pivot-hard.json").read_text())
    assert len(found["settings"]) == 6 and "cache" not in found["machine"]
    assert found["calibration"] is None  # no base-calibration-hard
    assert found["equal"] == [
        {"overrides": 8, "harm": {"margin:form=gap": 0.25, "random": 0.5}},
        {"overrides": 16, "harm": {"margin:form=gap": 0.5, "random": 1.0}},
    ]
    said, rows = summary.compared("calibration", found)
    assert said.startswith("On the calibration questions, rate of harm at equal numbers of overrides, those of margin")
    assert rows.endswith("| 8 | 0.2500 | 0.5000 |\n| 16 | 0.5000 | 1.0000 |")
    figure = pytest.importorskip("matplotlib.figure", reason="matplotlib is not installed: no plot was tested")
    axes = figure.Figure().subplots()
    found["certified"]["gap"] = {"rule": "margin:form=gap,m=0.1", "max_loss": 0.02}
    summary.draw_harm(axes, {"pivot-hard": found})
    drawn = [line.get_xydata().tolist() for line in axes.lines]
    # all of the answers are made with the same accept length
    assert drawn[:3] == [[[1.5, 0.25], [1.5, 0.5]], [[1.5, 0.25]], [[1.5, 1.0]]]
    assert (tmp_path / "r" / "pivot-hard.svg").is_file()


def fill(results: Results, given: dict[str, Any]) -> None:
    """Write answers."""
    for name, by_question in given.items():
        results.begin(name, {"depth": 8, "classifier": None})
        for one in by_question.values():
            results.add(one)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the target alone has only")
def test_a_killed_calibration_goes_on(call: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM ends the study and its process; the same call answers only what is missing, to the same certificate."""
    code = f"import sys; sys.path.append({str(BENCH)!r}); import pivot_study as s; s.TASKS['mixed'] = {TASK!r}; "
    code += "s.RULES = {'gap': s.RULES['gap']}; s.stop_on_sigterm(); sys.exit(s.main())"
    monkeypatch.setenv("PYTHONPATH", str(HERE))

    def start(work: str, stage: str = "calibrate") -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", code, stage, *call, "--work", work])

    for work in ("whole", "work"):
        assert start(work, "base").wait(200) == 0
    assert start("whole").wait(200) == 0
    out, lines = Path("work/calibrate-mixed-gap.jsonl"), 0
    process = start("work")
    while lines < 70 and process.poll() is None:
        lines = out.read_bytes().count(b"\n") if out.exists() else 0
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    held = out.read_bytes()
    time.sleep(1)
    assert out.read_bytes() == held and not Path("work/calibrate-mixed-gap.json").exists()
    assert start("work").wait(200) == 0
    assert out.read_bytes().startswith(held[: held.rfind(b"\n") + 1])
    read = [json.loads(Path(work, "calibrate-mixed-gap.json").read_text()) for work in ("whole", "work")]
    assert read[0]["tested"] == read[1]["tested"] and read[0]["rule"] == read[1]["rule"]
    assert len(out.read_bytes().splitlines()) == len(Path("whole/calibrate-mixed-gap.jsonl").read_bytes().splitlines())
