"""Tokens a second of a pair of pairs.py under relaxed rules, over plain decoding: as it is, and both models widened.

    python bench/pivot_speed.py --pairs-dir pairs --pair mixed --classifier pivot-mixed.safetensors --out h100 \\
        --rules "pivot:sigma=0.2; pivot:sigma=0.5; margin:form=gap,m=0.05"

One stream, temperature 0, questions of the test split. The controller decides how much is drafted; beside it stands
what comes of the whole depth in every round. Widening (pad_engine/models/widen.py) keeps the function, so acceptance is
that of the pair up to rounding, and gives steps the cost of the shapes: target 8b, draft model 1b. Its smallest numbers
are none of fp16, so on a GPU all is in bf16 here; in the type of the study, the pair as it is is timed by
pivot_study.py. That also measures, on many questions at once, what the rules do to answers.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import torch
from pivot_study import SEEDS, TASKS
from shapes import SHAPES, shape_config
from widened import wide_pair

from pad_engine.forest import Pair, make_pair
from pad_engine.forest_request import ForestRequest
from pad_engine.rules.classifier import PIVOT_MLP, load_classifier
from pad_engine.training.evaluate import as_requests, draw
from pad_engine.training.runner import Runner
from pad_engine.training.settings import GREEDY, TARGET, named
from pad_engine.training.tasks.select import make_task

MAX_LENGTH = 1024


def wide_classifier(path: Path, hidden_size: int, folder: Path) -> Path:
    """The classifier for a widened target: the hidden dimensions that are new weigh nothing."""
    narrow = load_classifier(path, PIVOT_MLP)
    weight = narrow.weights["hidden.weight"]
    wide = torch.zeros(len(weight), hidden_size)
    wide[:, : narrow.hidden_size] = weight
    place = folder / path.name
    replace(narrow, hidden_size=hidden_size, weights=narrow.weights | {"hidden.weight": wide}).save(place)
    return place


def widened(pair: Pair, shapes: Sequence[str]) -> Pair:
    """Both models in larger shapes, by the names of the target's and the draft model's."""
    assert pair.draft is not None
    target, draft = wide_pair(pair.target, pair.draft, *(shape_config(name, MAX_LENGTH) for name in shapes))
    return replace(pair, target=target, draft=draft)


def with_classifier(spec: str, classifier: Path) -> str:
    """A spec of the pivot rule with its file; others as they are."""
    name, _, rest = spec.partition(":")
    return f"pivot:model={classifier},{rest}" if name == "pivot" else spec


def measure(
    pair: Pair, requests: Sequence[ForestRequest], specs: Sequence[str], classifier: Path, depth: int
) -> dict[str, dict[str, Any]]:
    """Plain decoding, greedy verification and each rule, by their specs without the classifier's file. every_round: of
    a rule when it drafts the whole depth always."""
    assert pair.draft is not None
    runner = Runner(pair, pair.draft, depth)
    found: dict[str, dict[str, Any]] = {}
    for spec in dict.fromkeys((TARGET, GREEDY, *specs)):
        setting = runner.setting(with_classifier(spec, classifier))
        speed = runner.speed(setting, requests)
        plain = found.get(TARGET, speed)
        found[spec] = rated(speed, plain)
        if setting.depth:
            found[spec]["every_round"] = rated(runner.speed(setting, requests, fixed=True), plain)
        print(spec, found[spec], flush=True)
    return found


def rated(speed: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """A speed with the time of a round, and over plain decoding's."""
    return speed | {
        "ms_per_round": 1000 * speed["seconds"] * speed["tokens_per_round"] / speed["tokens"],
        "over_plain": speed["tokens_per_second"] / plain["tokens_per_second"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pairs-dir", type=Path, required=True, help="what pairs.py made")
    parser.add_argument("--pair", choices=list(TASKS), default="mixed")
    parser.add_argument("--model", default="smollm2-135m", help="base of the target: short name or folder")
    parser.add_argument("--classifier", type=Path, required=True)
    parser.add_argument("--rules", required=True, help="RULE; RULE; ..., pivot without its file")
    parser.add_argument("--shapes", nargs=2, choices=list(SHAPES), default=["8b", "1b"], help="of target and draft")
    parser.add_argument("--questions", type=int, default=12)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", required=True, help="folder of results/ for this card, h100 for instance")
    args = parser.parse_args()
    pair = make_pair(
        args.model, args.pairs_dir / f"drafter-{args.pair}", adapters=[args.pairs_dir / "target"], device=args.device,
        dtype=args.dtype, max_length=MAX_LENGTH,
    )  # fmt: skip
    assert pair.draft is not None
    task, specs = make_task(TASKS[args.pair]), named(args.rules)
    questions = draw(task, "test", args.questions, SEEDS["test"])
    requests = as_requests(questions, task, Runner(pair, pair.draft, args.depth).encode)
    found: dict[str, Any] = {"pair": args.pair, "depth": args.depth, "shapes": args.shapes}
    with torch.inference_mode():
        found["narrow"] = measure(pair, requests, specs, args.classifier, args.depth)
        name = f"pivot-speed-{args.pair}"
        harness.save(name, found, args.out)
        with tempfile.TemporaryDirectory() as folder:
            wide = widened(pair, args.shapes)
            classifier = wide_classifier(args.classifier, wide.target.decoder.config.hidden_size, Path(folder))
            found["wide"] = measure(wide, requests, specs, classifier, args.depth)
    print(harness.save(name, found, args.out))


if __name__ == "__main__":
    main()
