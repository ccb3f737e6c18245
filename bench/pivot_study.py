"""The study of pivots on the pairs of pairs.py: labels, classifiers, calibrated rules, and all of them tested.

    python bench/pivot_study.py all --pairs-dir pairs --out h100 --jobs 4
    python bench/pivot_study.py label --pairs-dir pairs --out h100 --only mixed --minutes 8

Stages: label, train, calibrate, eval (the certified setting of each rule, and its own distribution without
speculation), sweep (settings from strict to loose), speed (one stream), summary, all. Each is a number of `pad`
commands (jobs.py). A call takes the minutes it is given and little more, and the same call goes on where it stopped.
`summary` makes results/<out>/pivot-<pair>.json and .svg of what there is. Next to read: pivot_summary.py.
"""

import argparse
import json
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from jobs import AGAIN, DONE, Job, Queue
from pivot_summary import summarise

from pad_engine.training.settings import GREEDY, sweep_of, with_setting

# the third of all texts that a question is from depends on its text alone, so the three steps share none; pairs.py
# trains on seed 1000, which has no text in common with the labels' seed
SEEDS = {"train": 1, "calibration": 2, "test": 3}
TASKS = {"easy": "word-problems:digits=1", "hard": "word-problems", "mixed": "word-problems"}
# without the option that is calibrated. typical: at its usual delta of 0.3 all eps from 0.3 on are one rule
RULES = {
    "pivot": "pivot:model={classifier}",
    "gap": "margin:form=gap",
    "entropy": "entropy",
    "kl": "kl",
    "typical": "typical:delta=1",
    "random": "random",
}
# settings ahead of the sweeps of training/settings.py, where the strictest of these may do too much harm
STRICTER = {"pivot": (0.002, 0.005, 0.01, 0.02), "gap": (0.01, 0.02), "random": (0.002, 0.005, 0.01, 0.02)}
ENDS = {"pivot": (0.0, 1.0)}  # swept only: nothing is calibrated there
TIMED = ("pivot", "gap", "typical")  # the engine's own rules; the others are there to be compared with
PUBLISHED = 0.5  # sigma of the paper's headline speed
STAGES = ("label", "train", "calibrate", "eval", "sweep", "speed")
REFUSED = re.compile(r"nothing can be certified: .*|the target alone has .* any rule would pass")


@dataclass(frozen=True)
class Study:
    """A pair with the call's options, as commands and places see it."""

    pair: str
    args: argparse.Namespace

    def place(self, name: str) -> Path:
        """A file of this pair in the work folder."""
        return self.args.work / name.format(pair=self.pair)

    @property
    def target(self) -> list[str]:
        """The options of the target."""
        args = self.args
        adapter = str(args.pairs_dir / "target")
        return ["--model", args.model, "--adapter", adapter, "--device", args.device, "--dtype", args.dtype]

    def asked(self, split: str, questions: int) -> list[str]:
        """The options of the pair and of its questions."""
        return [
            "--task", TASKS[self.pair], *self.target,
            "--draft-model", str(self.args.pairs_dir / f"drafter-{self.pair}"),
            "--questions", str(questions), "--seed", str(SEEDS[split]), "--batch", str(self.args.batch),
        ]  # fmt: skip

    def rule(self, name: str) -> str:
        """The spec of a rule without a setting."""
        return RULES[name].format(classifier=self.place("pivot-{pair}.safetensors"))

    def sequence(self, name: str) -> list[float]:
        """The settings of a rule that are calibrated, strict to loose."""
        return [*STRICTER.get(name, ()), *sweep_of(self.rule(name)).values]

    def spec(self, name: str, value: float) -> str:
        """A rule with a setting."""
        return with_setting(self.rule(name), sweep_of(self.rule(name)).option, value)

    def certified(self, name: str) -> str | None:
        """The certified spec of a rule, if there is one."""
        place = self.place(f"calibrate-{{pair}}-{name}.json")
        return str(json.loads(place.read_text(encoding="utf-8"))["rule"]) if place.is_file() else None

    def label(self) -> list[str]:
        """`pad label`."""
        args, out = self.args, str(self.place("label-{pair}.jsonl"))
        return ["label", *self.asked("train", args.label_questions), "--labeller", args.labeller, "--out", out]

    def train(self) -> list[str]:
        """`pad train pivot`."""
        labels, out = str(self.place("label-{pair}.jsonl")), str(self.place("pivot-{pair}"))
        return ["train", "pivot", labels, *self.target, "--tap-layers", self.args.tap_layers, "--out", out]

    def calibrate(self, name: str) -> list[str]:
        """`pad calibrate` of a rule."""
        args = self.args
        return [
            "calibrate", *self.asked("calibration", args.questions), "--depth", str(args.depth),
            "--rule", self.rule(name), "--settings", ",".join(f"{value:g}" for value in self.sequence(name)),
            "--max-loss", str(args.max_loss), "--confidence", str(args.confidence),
            "--out", str(self.place(f"calibrate-{{pair}}-{name}.jsonl")),
        ]  # fmt: skip

    def evaluate(self, out: str, specs: Sequence[str], questions: int, *more: str) -> list[str]:
        """`pad eval` of rules, into a file of this pair."""
        return [
            "eval", *self.asked("test", questions), "--depth", str(self.args.depth), "--rules", ";".join(specs),
            "--confidence", str(self.args.confidence), *more, "--out", str(self.place(out)),
        ]  # fmt: skip

    def base(self) -> list[str]:
        """The target, the draft model and greedy verification: what all rules are compared with."""
        return self.evaluate("base-{pair}.jsonl", [GREEDY], self.args.questions)

    def eval(self, name: str) -> list[str] | str:
        """The certified setting of a rule, and the rule's own distribution."""
        if (spec := self.certified(name)) is None:
            return "nothing certified"
        apart = str(self.place(f"calibrate-{{pair}}-{name}.jsonl"))
        return self.tested(name, [spec], "--direct", "--apart", apart)

    def sweep(self, name: str) -> list[str]:
        """A rule from strict to loose."""
        return self.tested(name, self.sweep_specs(name))

    def sweep_specs(self, name: str) -> list[str]:
        """The settings that are calibrated, and the ends of what there are."""
        return [self.spec(name, value) for value in sorted({*self.sequence(name), *ENDS.get(name, ())})]

    def tested(self, name: str, specs: Sequence[str], *more: str) -> list[str]:
        """Settings of a rule, into the file of its answers. That begins as a copy of the base's, which saves decoding
        these for each rule again."""
        place, base = self.place(f"test-{{pair}}-{name}.jsonl"), self.place("base-{pair}.jsonl")
        if not place.exists():
            part = place.with_suffix(".part")
            part.write_bytes(base.read_bytes())
            part.replace(place)
        return self.evaluate(place.name, specs, self.args.questions, *more)

    def speed(self) -> list[str]:
        """One stream at a time: the certified settings, and the one of the paper's figure."""
        specs = [spec for name in TIMED if (spec := self.certified(name))] + [self.spec("pivot", PUBLISHED)]
        count = self.args.time
        return self.evaluate("speed-{pair}.jsonl", list(dict.fromkeys(specs)), count, "--time", str(count))

    def jobs(self) -> dict[str, list[Job]]:
        """The jobs of each stage."""
        pair = self.pair
        label, train, base = f"label-{pair}", f"train-{pair}", f"base-{pair}"
        found: dict[str, list[Job]] = {stage: [] for stage in STAGES}
        found["label"] += [Job(label, self.label)]
        found["train"] += [Job(train, self.train, (label,))]
        found["eval"] += [Job(base, self.base)]
        for name in RULES:
            made = (train,) if name == "pivot" else ()
            calibrate, test = f"calibrate-{pair}-{name}", f"eval-{pair}-{name}"
            found["calibrate"] += [Job(calibrate, partial(self.calibrate, name), made, REFUSED)]
            found["eval"] += [Job(test, partial(self.eval, name), (base, calibrate))]
            found["sweep"] += [Job(f"sweep-{pair}-{name}", partial(self.sweep, name), (test,))]
        needs = (train, *(f"calibrate-{pair}-{name}" for name in TIMED))
        found["speed"] += [Job(f"speed-{pair}", self.speed, needs, alone=True)]
        return found


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of a call."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("stage", choices=[*STAGES, "summary", "all"])
    parser.add_argument("--pairs-dir", type=Path, required=True, help="what pairs.py made")
    parser.add_argument("--out", required=True, help="folder of results/ for this card, h100 for instance, or a path")
    parser.add_argument("--work", type=Path, default=Path("bench-logs/pivot"), help="folder of labels, answers, logs")
    parser.add_argument("--only", nargs="+", choices=list(TASKS), default=list(TASKS), help="pairs")
    parser.add_argument("--minutes", type=float, default=8.0, help="of this call")
    parser.add_argument("--jobs", type=int, default=1, help="commands at the same time")
    parser.add_argument("--model", default="smollm2-135m", help="base of the target: short name or folder")
    parser.add_argument("--labeller", choices=["greedy", "pad"], default="greedy")
    parser.add_argument("--label-questions", type=int, default=2000)
    parser.add_argument("--tap-layers", default="20,23,26", help="the best by validation is taken")
    parser.add_argument("--questions", type=int, default=4000, help="to calibrate on, and to test on")
    parser.add_argument("--time", type=int, default=20, help="questions that are timed")
    parser.add_argument("--max-loss", type=float, default=0.02)
    parser.add_argument("--confidence", type=float, default=0.95)
    parser.add_argument("--depth", type=int, default=8, help="drafted tokens a round")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every job of the stage has a result."""
    args = parse(arguments)
    studies = [Study(pair, args) for pair in args.only]
    stages = STAGES if args.stage == "all" else [stage for stage in STAGES if stage == args.stage]
    per_pair = [study.jobs() for study in studies]
    jobs = [job for stage in stages for found in per_pair for job in found[stage]]
    found = Queue(jobs, args.work, args.jobs).run(60 * args.minutes)
    if args.stage in ("summary", "all"):
        for study in studies:
            summarise(study.pair, list(RULES), SEEDS, args)
    failed = [f"{name}: {outcome}" for name, outcome in found.items() if outcome.startswith("failed")]
    left = [name for name, outcome in found.items() if outcome.startswith(AGAIN)]
    more = [f"{len(left)} jobs are left: {', '.join(left)}; run the same command again"] if left else []
    print("\n".join([*failed, *more]) or DONE)
    return int(bool(failed or left))


def stop_on_sigterm() -> None:
    """Leave as on Ctrl-C, so that what runs is stopped too; it is gone on with the next time."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


if __name__ == "__main__":
    stop_on_sigterm()
    raise SystemExit(main())
