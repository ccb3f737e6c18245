"""What pivot_study.py has found out of a pair: one small result file, a plot, and tables.

The answers stay in the work folder; the result has counts, rates and intervals, and the commands that give them again.
"""

import argparse
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import harness
import plots
from jobs import DONE, read_mark

from pad_engine.training.apart import used_questions
from pad_engine.training.label_file import read_labels
from pad_engine.training.report import equal_overrides, number, over, speed, table
from pad_engine.training.results import Answered, Results
from pad_engine.training.settings import DIRECT, DRAFT, GREEDY, TARGET
from pad_engine.training.summary import Evaluation, evaluation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = (
    "rule", "calibrated: harms, at most", "tested: harms, at most", "net, points", "accept length", "tokens/round",
    "overrides/100", "without speculation: harms, net", "tokens/s",
)  # fmt: skip


def summarise(pair: str, rules: Sequence[str], seeds: Mapping[str, int], args: argparse.Namespace) -> None:
    """Write and print what there is of a pair; nothing without the answers of the target and of greedy verification.

    rules: names, that whose numbers of overrides the others are compared at first. args: of pivot_study.py."""
    tested = [f"base-{pair}", *(f"{stage}-{pair}-{name}" for name in rules for stage in ("test", "sweep"))]
    found = evaluated(args.work, tested, args.confidence)
    if found is None:
        print(f"{pair}: no summary, as base-{pair} is not done")
        return
    calibrated = [f"base-calibration-{pair}", *(f"calibrate-{pair}-{name}" for name in rules)]
    calibration = evaluated(args.work, calibrated, args.confidence)
    header = Results(args.work / f"{tested[0]}.jsonl").header
    result = {
        "pair": pair,
        "run": {key: value for key, value in header.items() if key != "machine"},
        "greedy_as_target": next(one.same_as_target for one in found.settings if one.setting == GREEDY),
        # where the pad commands ran, without its folders
        "machine": {key: value for key, value in header["machine"].items() if key != "cache"},
        "seeds": dict(seeds),
        "labels": labels_of(args.work / f"label-{pair}.jsonl"),
        "classifier": classifier_of(args.work / f"pivot-{pair}.json"),
        "certified": {name: certificate_of(args.work, f"calibrate-{pair}-{name}") for name in rules},
        **curves_of(found),
        "calibration": calibration and curves_of(calibration),
        "speeds": speeds_of(args.work / f"speed-{pair}.jsonl"),
        "commands": commands_of(args.work, pair),
    }
    result = without_folders(result, args.work, args.pairs_dir, Path(args.model).parent)
    path = harness.save(f"pivot-{pair}", result, args.out)
    print(f"\n{pair}: {path}\n\n{report(result)}\n")
    draw(path.with_suffix(".svg"), result)
    if result["calibration"]:
        draw(path.with_name(f"{path.stem}-calibration.svg"), {**result, **result["calibration"]})


def evaluated(work: Path, names: Sequence[str], confidence: float) -> Evaluation | None:
    """What the whole answers in files of results say, the first of which has the target's and greedy verification's;
    None as long as it has not."""
    answers = whole([one for name in names if (one := opened(work / f"{name}.jsonl"))])
    if not {TARGET, DRAFT, GREEDY} <= answers.keys():
        return None
    specs = [name for name in answers if name not in (TARGET, DRAFT, GREEDY) and not name.startswith(DIRECT)]
    return evaluation(answers, specs, confidence)


def curves_of(found: Evaluation) -> dict[str, Any]:
    """The figures of all settings, which are of one rule, strict to loose, and what comparing those says."""
    return {
        "settings": [asdict(one) for one in found.settings],
        "families": {name: [one.setting for one in sweep] for name, sweep in found.families.items()},
        "equal": found.equal,
        "falls": [asdict(step) for step in found.falls],
    }


def opened(path: Path) -> Results | None:
    """A file of results that has at least begun."""
    found = Results(path) if path.is_file() else None
    return found if found and found.header else None


def whole(results: Sequence[Results]) -> dict[str, dict[str, Answered]]:
    """The answers of settings that have answered every question of the first one, in its order."""
    found: dict[str, dict[str, Answered]] = {}
    for one in results:
        for name, given in one.answers.items():
            order = next(iter(found.values()), given)
            if len(given) == one.header["questions"] and given.keys() == order.keys():
                found.setdefault(name, {question: given[question] for question in order})
    return found


def labels_of(path: Path) -> dict[str, int] | None:
    """How many labels there are, of how many questions that were looked at."""
    if not path.is_file():
        return None
    labels = read_labels(path)[1]
    pivots = sum(label.pivot for label in labels)
    return {"questions": len(used_questions(path)), "labels": len(labels), "pivots": pivots}


def classifier_of(path: Path) -> dict[str, Any] | None:
    """Of a classifier's training what compares it with scores that need none."""
    if not path.is_file():
        return None
    training = json.loads(path.read_text(encoding="utf-8"))["training"]
    keys = ("tap_layer", "tap_layers", "counts", "rankings", "free", "lead", "above_floor")
    return {key: training[key] for key in keys}


def certificate_of(work: Path, job: str) -> dict[str, Any]:
    """A certificate, or why there is none."""
    path, mark = work / f"{job}.json", read_mark(work, job)
    if mark is None or mark.outcome != DONE:
        return {"none": "not done" if mark is None else mark.outcome}
    certificate = json.loads(path.read_text(encoding="utf-8"))
    return {key: value for key, value in certificate.items() if key not in ("run", "results")}


def speeds_of(path: Path) -> dict[str, dict[str, Any]]:
    """Tokens a second of the settings that were timed."""
    found = opened(path)
    return found.speeds if found else {}


def commands_of(work: Path, pair: str) -> dict[str, str]:
    """The commands of the pair's jobs that are done, as a shell takes them."""
    names = [place.stem for place in sorted(work.glob("*.done")) if pair in place.stem.split("-")]
    marks = {name: mark for name in names if (mark := read_mark(work, name)) and mark.command}
    return {name: shlex.join(["pad", *mark.command]) for name, mark in marks.items()}


def without_folders(result: Any, *folders: Path) -> Any:
    """The same, with the names of files in place of their paths. folders: that they lie in."""
    text = json.dumps(result, allow_nan=False)
    for folder in folders:
        text = re.sub(rf"(?<![\w./-]){re.escape(json.dumps(str(folder))[1:-1])}/", "", text)
    return json.loads(text)


def report(result: Mapping[str, Any]) -> str:
    """The tables of a pair."""
    base = {one["setting"]: one for one in result["settings"]}
    rows = [row_of(name, certificate, base, result["speeds"]) for name, certificate in result["certified"].items()]
    target, draft, greedy = (base[name] for name in (TARGET, DRAFT, GREEDY))
    parts = [
        f"Of {target['questions']} questions the target has {target['utility']:.1%} right and the draft model "
        f"{draft['utility']:.1%}; greedy verification accepts {greedy['mean_accept_length']:.2f} tokens a round and "
        f"gives the target's ids for {result['greedy_as_target']} questions and harms {greedy['harms']}, by rounding "
        f"in {result['run']['dtype']} alone.",
        table(COLUMNS, rows),
    ]
    for questions, curves in (("test", result), ("calibration", result["calibration"])):
        parts += compared(questions, curves) if curves else []
    return "\n\n".join(parts)


def compared(questions: str, curves: Mapping[str, Any]) -> list[str]:
    """Rules at equal numbers of overrides on some questions, and settings that harm less than stricter ones."""
    parts = []
    if curves["equal"] and len(curves["families"]) > 1:
        parts += [
            f"On the {questions} questions, rate of harm at equal numbers of overrides, those of "
            f"{next(iter(curves['families']))}; between the settings that were run, and no harm at no overrides, on "
            "straight lines:",
            equal_overrides(curves["equal"]),
        ]
    return parts + [
        f"On the {questions} questions {step['loose']} harms less than {step['strict']}: {step['fewer']} questions "
        f"against {step['more']}, p = {step['p_value']:.2g}."
        for step in curves["falls"]
    ]


def row_of(
    name: str, certificate: Mapping[str, Any], by_name: Mapping[str, Any], speeds: Mapping[str, Any]
) -> list[str]:
    """A rule's certified setting, on the calibration and on the test questions."""
    if "none" in certificate:
        return [f"{name}: {certificate['none']}", *["-"] * (len(COLUMNS) - 1)]
    spec = certificate["rule"]
    calibrated = f"{certificate['harms']}, {certificate['harm_upper_bound']:.4f}"
    if spec not in by_name:
        return [f"{spec}: not tested yet", calibrated, *["-"] * (len(COLUMNS) - 2)]
    one, direct, greedy = by_name[spec], by_name.get(f"{DIRECT}{spec}"), by_name[GREEDY]
    return [
        spec, calibrated, f"{one['harms']}, {one['harm_upper_bound']:.4f}", net(one),
        over(one["mean_accept_length"], greedy["mean_accept_length"], 2), number(one["tokens_per_round"], 2),
        number(one["overrides_per_100_tokens"], 2), f"{direct['harms']}, {net(direct)}" if direct else "-",
        speed(spec, speeds),
    ]  # fmt: skip


def net(one: Mapping[str, Any]) -> str:
    """A net difference with its interval, in points of a hundred."""
    low, high = one["net_interval"]
    return f"{100 * one['net']:+.2f} ({100 * low:+.2f}, {100 * high:+.2f})"


def draw(path: Path, result: dict[str, Any]) -> None:
    """The plot as SVG; none, and a line that says so, without matplotlib."""
    cards = [card["name"] for card in result["machine"]["gpus"]] or [None]
    environment = harness.environment() | {"card": cards[0]}
    try:
        plots.write(path, draw_harm, {path.stem: {**result, "environment": environment}})
    except ImportError:
        print("no plot: matplotlib is not installed (pip install 'pad-engine[plots]')")


def draw_harm(axes: "Axes", results: plots.Results) -> None:
    """Rates of harm against accept lengths, a line a rule; certified settings are marked, and what may be lost."""
    (result,) = results.values()
    by_name = {one["setting"]: one for one in result["settings"]}
    certified = {one["rule"] for one in result["certified"].values() if "rule" in one}
    for name, sweep in result["families"].items():
        points = [(by_name[spec]["mean_accept_length"], by_name[spec]["harm"]) for spec in sweep]
        (line,) = axes.plot(*zip(*points, strict=True), marker=".", label=name)
        marked = [point for spec, point in zip(sweep, points, strict=True) if spec in certified]
        if marked:
            axes.plot(*zip(*marked, strict=True), "o", color=line.get_color(), markersize=9)
    axes.axvline(by_name[GREEDY]["mean_accept_length"], color="gray", linestyle="--", label="greedy verification")
    limits = {one["max_loss"] for one in result["certified"].values() if "rule" in one}
    for limit in limits:
        axes.axhline(limit, color="gray", linewidth=0.8)
    axes.set(xlabel=f"accepted tokens a round, pair {result['pair']}", ylabel="rate of harm")
    axes.set_yscale("symlog", linthresh=0.001)  # what matters lies between one in a thousand and the limit
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)
