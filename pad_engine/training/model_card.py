"""The files of a trained classifier: NAME.safetensors and NAME.json, which rules load, and the model card NAME.md.

Everything that the card says is in the JSON under `training`. The JSON also lists the questions, so that calibration
and evaluation can refuse them.
"""

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pad_engine import __version__
from pad_engine.errors import RequestError
from pad_engine.rules.classifier import LINEAR_JUDGE, Classifier
from pad_engine.rules.pivot import FLOOR
from pad_engine.training.fit import Epoch, Settings
from pad_engine.training.label_file import Label
from pad_engine.training.metrics import PIVOT_RECALL
from pad_engine.training.pivot import TEST, VALIDATION, Trained

CURVE_ROWS = 12


def report(
    path: Path, header: Mapping[str, Any], settings: Settings, trained: Trained, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """A run as JSON holds it. path, header: of the labels. facts: of the run, such as its command and device."""
    best = trained.best
    # where they were made is in the labels themselves, with paths that say nothing elsewhere
    asked = {name: value for name, value in header.items() if name != "machine"}
    return {
        "labels": {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "header": asked},
        "settings": asdict(settings),
        "run": dict(facts),
        "versions": {"pad_engine": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "counts": {side: asdict(count) for side, count in trained.counts.items()},
        "fitted_on": asdict(trained.fitted_on),
        "tap_layers": [
            {
                "tap_layer": run.tap_layer, "validation_auc": run.auc, "epochs": len(run.fitted.curve),
                "best_epoch": run.fitted.best,
            }
            for run in trained.runs
        ],
        "tap_layer": best.tap_layer,
        "curve": [asdict(epoch) for epoch in best.fitted.curve],
        "best_epoch": best.fitted.best,
        "rankings": {
            side: {name: asdict(ranking) for name, ranking in rankings.items()}
            for side, rankings in trained.rankings.items()
        },
        "free": trained.free,
        "lead": list(trained.lead),
        "thresholds": [asdict(row) for row in trained.thresholds],
        "above_floor": trained.above_floor,
    }  # fmt: skip


def save(path: Path, classifier: Classifier, labels: Sequence[Label], found: Mapping[str, Any]) -> None:
    """Write the three files beside their places, then put them there. path: NAME.safetensors. found: as report gives
    it."""
    part = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    suffixes = (".json", ".md", path.suffix)
    try:
        questions = list(dict.fromkeys(label.question for label in labels))
        classifier.save(part, questions=questions, training=found)
        part.with_suffix(".md").write_text(card(path, classifier, found), encoding="utf-8")
        for suffix in suffixes:
            os.replace(part.with_suffix(suffix), path.with_suffix(suffix))
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        for suffix in suffixes:
            part.with_suffix(suffix).unlink(missing_ok=True)


def card(path: Path, classifier: Classifier, found: Mapping[str, Any]) -> str:
    """The model card, in Markdown."""
    rule = "judge:model={},delta=0.5" if classifier.kind == LINEAR_JUDGE else "pivot:model={},sigma=0.3"
    parts = [
        f"# {path.stem}",
        f"A classifier of drafted tokens (`{classifier.kind}`) for the target `{classifier.target}`: how likely it is "
        "that keeping a token changes the result. It reads the state behind layer "
        f"{classifier.tap_layer} (from 0) of the token's own row"
        + (f" and the {' and '.join(classifier.scalars)} of the row that judges it" if classifier.scalars else "")
        + ".",
        "```\npad generate PROMPT --model MODEL --draft-model DRAFT \\\n    --rule " + rule.format(path.name) + "\n```",
        "Both classes weighed the same in training, so the probability is no frequency: choose the threshold with "
        "`pad calibrate`.",
        verdict(classifier, found),
        "## Figures",
        f"AP is the average precision for pivots; the last columns are the share of harmless tokens kept where "
        f"{PIVOT_RECALL:.0%} of the pivots are rejected. Margin, entropy and probability need no training.",
        rankings_table(found),
        "Thresholds on the test side: a token is kept at a pivot probability up to it.",
        thresholds_table(found),
        *([] if classifier.kind == LINEAR_JUDGE else [floor_line(found)]),
        "## Data",
        data_lines(found),
        "## Training",
        training_lines(found),
    ]
    return "\n\n".join(parts) + "\n"


def verdict(classifier: Classifier, found: Mapping[str, Any]) -> str:
    """Whether the classifier is better than the best score without training."""
    test, free, (low, high) = found["rankings"][TEST], found["free"], found["lead"]
    outcome = "beats" if low > 0 else "is beaten by" if high < 0 else "cannot be told from"
    return (
        f"On the test side it {outcome} the best score without training, {free}: AUC "
        f"{test[classifier.kind]['auc']:.3f} against {test[free]['auc']:.3f}, a lead of {low:.3f} to {high:.3f} (95 % "
        "of draws of the questions)."
    )


def rankings_table(found: Mapping[str, Any]) -> str:
    """AUC, AP and harmless accepted of every score on both sides."""
    names = (("auc", "AUC", ".3f"), ("average_precision", "AP", ".3f"), ("harmless_accepted", "harmless kept", ".1%"))
    rows = [["score", *(f"{side} {title}" for _, title, _ in names for side in (VALIDATION, TEST))]]
    for score in found["rankings"][TEST]:
        cells = [
            f"{found['rankings'][side][score][key]:{form}}" for key, _, form in names for side in (VALIDATION, TEST)
        ]
        rows.append([score, *cells])
    return table(rows)


def thresholds_table(found: Mapping[str, Any]) -> str:
    """Pivots and harmless tokens at each threshold."""
    rows = [["threshold", "pivots rejected", "pivots among the rejected", "harmless kept"]]
    for row in found["thresholds"]:
        precision = row["pivot_precision"]
        rows.append([
            f"{row['threshold']:.1f}", f"{row['pivot_recall']:.1%}", "-" if precision is None else f"{precision:.1%}",
            f"{row['harmless_accepted']:.1%}",
        ])  # fmt: skip
    return table(rows)


def floor_line(found: Mapping[str, Any]) -> str:
    """What the rule's floor keeps back of what the table has."""
    return (
        f"The rule keeps no token of probability below {FLOOR:g} unless it has `floor=0`: of these harmless tokens "
        f"{found['above_floor']:.1%} are not below."
    )


def data_lines(found: Mapping[str, Any]) -> str:
    """Where the labels are from, how many there are, and on which side."""
    labels = found["labels"]
    rows = [["side", "questions", "pivots", "harmless"]]
    for side, count in [*found["counts"].items(), ("fitted on", found["fitted_on"])]:
        rows.append([side, *(str(count[name]) for name in ("questions", "pivots", "harmless"))])
    source = f"Labels `{labels['file']}`, SHA-256 `{labels['sha256']}`, made with:"
    return "\n\n".join((source, listing(labels["header"]), "Shared out by question:", table(rows)))


def training_lines(found: Mapping[str, Any]) -> str:
    """Settings, layers, and the losses by epoch."""
    layers = [["tap layer", "validation AUC", "epochs", "best epoch"]]
    for run in found["tap_layers"]:
        auc, epochs, best = run["validation_auc"], run["epochs"], run["best_epoch"]
        layers.append([str(run["tap_layer"]), f"{auc:.3f}", str(epochs), str(best)])
    curve = [["epoch", "train loss", "validation loss"]]
    for epoch in thinned([Epoch(**epoch) for epoch in found["curve"]], found["best_epoch"]):
        curve.append([str(epoch.epoch), f"{epoch.train_loss:.4f}", f"{epoch.validation_loss:.4f}"])
    made_with = listing(found["settings"] | found["run"] | found["versions"])
    chosen = f"The weights are those of epoch {found['best_epoch']} behind layer {found['tap_layer']}."
    return "\n\n".join((made_with, table(layers), chosen, table(curve)))


def thinned(curve: Sequence[Epoch], best: int) -> list[Epoch]:
    """A few of the epochs, evenly spread, and the best among them."""
    steps = max(1, len(curve) // CURVE_ROWS)
    return [epoch for epoch in curve if epoch.epoch in (1, best, len(curve)) or epoch.epoch % steps == 0]


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows, the first of which is the head, in Markdown."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def listing(facts: Mapping[str, Any]) -> str:
    """One line a fact."""
    return "\n".join(f"- {name}: {json.dumps(value)}" for name, value in facts.items())
