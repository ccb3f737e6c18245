"""The study of pivots on the pairs of pairs.py: labels, classifiers, calibrated rules, and all of them tested.

    python bench/pivot_study.py all --pairs-dir pairs --out h100 --jobs 6
    python bench/pivot_study.py label --pairs-dir pairs --out h100 --only mixed --minutes 8

Stages: label (in shards), train, base (target, draft model and greedy verification, on the questions to calibrate on
and on those to test on), calibrate, eval (the certified setting of each rule, and its own distribution without
speculation), sweep (settings from strict to loose), speed (one stream), summary, all. Each is a number of `pad`
commands (jobs.py), the classifier's chain first. A call takes the minutes it is given, and `all` half a minute a pair
more for the summary; the same call goes on where it stopped. `summary` makes results/<out>/pivot-<pair>.json and .svg
of what there is.

All is decoded in fp16, and timed in it. Types narrower than fp32 round a pass over several drafted tokens otherwise
than one over a single token: greedy verification then departs from the target's ids here and there, which harms some
questions by itself and makes pivots of tokens that are none. That is counted against every rule and learnt by the
classifier. fp16 has a mantissa of ten bits, as many as TF32, and bf16 has seven: fp16 rounds eight times finer at
bf16's speed, in half of fp32's memory. Its largest number is 65,504; what exceeds it fails its job by the question's
name. The summary says for how many questions greedy verification gives the target's ids, and how many it harms; with
--dtype float32 these are next to none. Next to read: pivot_summary.py.
"""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from jobs import AGAIN, DONE, Job, Queue, stop_on_sigterm
from pivot_summary import certificate_of, summarise

from pad_engine.files import write_file
from pad_engine.training.settings import GREEDY, sweep_of, with_setting

# the third of all texts that a question is from depends on its text alone, so the three steps share none; pairs.py
# trains on seed 1000, which has no text in common with the labels' seed. Questions of seeds 2 and 3 were seen while the
# rules and settings below were chosen: whoever changes these takes fresh seeds
SEEDS = {"train": 1, "calibration": 4, "test": 5}
TASKS = {"easy": "word-problems:digits=1", "hard": "word-problems", "mixed": "word-problems"}


@dataclass(frozen=True)
class Rule:
    """spec: without the option that is calibrated. settings: its values, strict to loose, to calibrate and to sweep.
    ends: swept only, as nothing can be calibrated there."""

    spec: str
    settings: tuple[float, ...]
    ends: tuple[float, ...] = ()


# settings of one rule share what their answers have in common, so a step between two others costs little
RULES = {
    "unfloored": Rule(
        "pivot:model={classifier},floor=0",
        (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3, 0.5, 0.8),
        (0.0, 1.0),
    ),
    # PAD's own floor, 1e-4: most of what a drafter words in its own way lies below it. No other rule here has one
    "pivot": Rule(
        "pivot:model={classifier}", (0.02, 0.05, 0.08, 0.1, 0.12, 0.15, 0.2, 0.3, 0.5, 0.7, 0.85, 0.95), (0.0, 1.0)
    ),
    "gap": Rule("margin:form=gap", (0.02, 0.05, 0.1, 0.2, 0.5, 0.7, 0.8, 0.9, 0.97)),
    "entropy": Rule("entropy", (2.5, 2.3, 2.2, 2.15, 2.1, 2.0, 1.5, 1.0)),
    "kl": Rule("kl", (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.2, 1.6, 2.4)),
    # at its usual delta of 0.3 all eps from 0.3 on are one rule; at 1 all from 0.5 on, which a second token never has
    "typical": Rule("typical:delta=1", (0.5, 0.4, 0.3, 0.2, 0.1, 0.08, 0.06, 0.04, 0.02)),
    "random": Rule("random", (0.005, 0.01, 0.02, 0.03, 0.04, 0.1, 0.3, 0.8)),
}
TRAINED = tuple(name for name, rule in RULES.items() if "{classifier}" in rule.spec)
TIMED = (*TRAINED, "gap", "typical")  # the engine's own rules; the others are there to be compared with
PUBLISHED = 0.5  # sigma of the paper's headline speed
BASE, BASE_CALIBRATION = "base-{pair}.jsonl", "base-calibration-{pair}.jsonl"  # answers that others are compared with
STAGES = ("label", "train", "base", "calibrate", "eval", "sweep", "speed")
# names of the jobs whose chain is the longest: labels, training, and the classifier's first rule calibrated and tested
CHAIN = re.compile(f"label-|train-|base-calibration-|(calibrate|eval)-.*-{TRAINED[0]}$")
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

    @property
    def shards(self) -> range:
        """The numbers of the labels' shards."""
        return range(1, self.args.label_shards + 1)

    def asked(self, split: str, questions: int) -> list[str]:
        """The options of the pair and of its questions."""
        return [
            "--task", TASKS[self.pair], *self.target,
            "--draft-model", str(self.args.pairs_dir / f"drafter-{self.pair}"),
            "--questions", str(questions), "--seed", str(SEEDS[split]), "--batch", str(self.args.batch),
        ]  # fmt: skip

    def rule(self, name: str) -> str:
        """The spec of a rule without a setting."""
        return RULES[name].spec.format(classifier=self.place("pivot-{pair}.safetensors"))

    def spec(self, name: str, value: float) -> str:
        """A rule with a setting."""
        return with_setting(self.rule(name), sweep_of(self.rule(name)).option, value)

    def certified(self, name: str) -> str | None:
        """The certified spec of a rule, if its calibration is done and found one."""
        return certificate_of(self.args.work, f"calibrate-{self.pair}-{name}").get("rule")

    def labels_of(self, number: int) -> str:
        """The file of a shard's labels."""
        return str(self.place(f"label-{{pair}}-{number}-of-{self.args.label_shards}.jsonl"))

    def label(self, number: int) -> list[str]:
        """`pad label` of a shard."""
        return [
            "label", *self.asked("train", self.args.label_questions), "--labeller", self.args.labeller,
            "--depth", str(self.args.depth), "--shard", f"{number}/{self.args.label_shards}",
            "--out", self.labels_of(number),
        ]  # fmt: skip

    def merge(self) -> list[str]:
        """`pad merge-labels`."""
        parts = [self.labels_of(number) for number in self.shards]
        return ["merge-labels", str(self.place("label-{pair}.jsonl")), *parts]

    def train(self) -> list[str]:
        """`pad train pivot`."""
        labels, out = str(self.place("label-{pair}.jsonl")), str(self.place("pivot-{pair}"))
        return ["train", "pivot", labels, *self.target, "--tap-layers", self.args.tap_layers, "--out", out]

    def calibrate(self, name: str) -> list[str]:
        """`pad calibrate` of a rule."""
        args = self.args
        return [
            "calibrate", *self.asked("calibration", args.questions), "--depth", str(args.depth),
            "--rule", self.rule(name), "--settings", ",".join(f"{value:g}" for value in RULES[name].settings),
            "--max-loss", str(args.max_loss), "--confidence", str(args.confidence),
            "--answers", str(self.place(BASE_CALIBRATION)),
            "--out", str(self.place(f"calibrate-{{pair}}-{name}.jsonl")),
        ]  # fmt: skip

    def evaluate(self, out: str, specs: Sequence[str], questions: int, *more: str, split: str = "test") -> list[str]:
        """`pad eval` of rules, into a file of this pair."""
        return [
            "eval", *self.asked(split, questions), "--split", split, "--depth", str(self.args.depth),
            "--rules", ";".join(specs), "--confidence", str(self.args.confidence), *more, "--out", str(self.place(out)),
        ]  # fmt: skip

    def base(self, split: str, out: str) -> list[str]:
        """The target, the draft model and greedy verification: what all rules are compared with."""
        return self.evaluate(out, [GREEDY], self.args.questions, split=split)

    def eval(self, name: str) -> list[str] | str:
        """The certified setting of a rule, and the rule's own distribution."""
        if (spec := self.certified(name)) is None:
            return "nothing certified"
        apart = str(self.place(f"calibrate-{{pair}}-{name}.jsonl"))
        return self.tested(f"test-{{pair}}-{name}.jsonl", [spec], "--direct", "--apart", apart)

    def sweep(self, name: str) -> list[str]:
        """All settings of a rule."""
        return self.tested(f"sweep-{{pair}}-{name}.jsonl", self.sweep_specs(name))

    def sweep_specs(self, name: str) -> list[str]:
        """The settings that are calibrated, and the ends of what there are."""
        rule = RULES[name]
        return [self.spec(name, value) for value in (*rule.settings, *rule.ends)]

    def tested(self, out: str, specs: Sequence[str], *more: str) -> list[str]:
        """Settings of a rule, into a file of answers. That begins as a copy of the base's, which saves decoding these
        again and again."""
        place, base = self.place(out), self.place(BASE)
        if not place.exists():
            write_file(place, base.read_bytes())
        return self.evaluate(out, specs, self.args.questions, *more)

    def speed(self) -> list[str]:
        """One stream at a time: the certified settings, and the one of the paper's figure."""
        specs = [spec for name in TIMED if (spec := self.certified(name))] + [self.spec("pivot", PUBLISHED)]
        count = self.args.time
        return self.evaluate("speed-{pair}.jsonl", list(dict.fromkeys(specs)), count, "--time", str(count))

    def jobs(self) -> dict[str, list[Job]]:
        """The jobs of each stage."""
        pair = self.pair
        label, train = f"label-{pair}", f"train-{pair}"
        base, base_calibration = f"base-{pair}", f"base-calibration-{pair}"
        shards = {f"{label}-{number}": partial(self.label, number) for number in self.shards}
        found: dict[str, list[Job]] = {stage: [] for stage in STAGES}
        found["label"] += [Job(name, command) for name, command in shards.items()]
        found["label"] += [Job(label, self.merge, tuple(shards))]
        found["train"] += [Job(train, self.train, (label,))]
        found["base"] += [Job(base_calibration, partial(self.base, "calibration", BASE_CALIBRATION))]
        found["base"] += [Job(base, partial(self.base, "test", BASE))]
        for name in RULES:
            made = (train,) if name in TRAINED else ()
            calibrate = f"calibrate-{pair}-{name}"
            needs = (base_calibration, *made)
            found["calibrate"] += [Job(calibrate, partial(self.calibrate, name), needs, REFUSED)]
            found["eval"] += [Job(f"eval-{pair}-{name}", partial(self.eval, name), (base, calibrate))]
            found["sweep"] += [Job(f"sweep-{pair}-{name}", partial(self.sweep, name), (base, *made))]
        needs = (train, *(f"calibrate-{pair}-{name}" for name in TIMED))
        found["speed"] += [Job(f"speed-{pair}", self.speed, needs, alone=True)]
        return found


def in_order(studies: Sequence[Study], stages: Sequence[str]) -> list[Job]:
    """The jobs of all pairs: first the longest chain, then what is left, stage by stage, and in each the classifier's
    rule first."""
    per_pair = [study.jobs() for study in studies]
    by_stage = [[job for found in per_pair for job in found[stage]] for stage in stages]
    every = [job for jobs in by_stage for job in sorted(jobs, key=lambda job: not job.name.endswith(TRAINED))]
    return sorted(every, key=lambda job: not CHAIN.match(job.name))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of a call."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("stage", choices=[*STAGES, "summary", "all"])
    parser.add_argument("--pairs-dir", type=Path, required=True, help="what pairs.py made")
    parser.add_argument("--out", required=True, help="folder of results/ for this card, h100 for instance, or a path")
    parser.add_argument("--work", type=Path, default=Path("bench-logs/pivot"), help="folder of labels, answers, logs")
    parser.add_argument("--only", nargs="+", choices=list(TASKS), default=list(TASKS), help="pairs")
    parser.add_argument("--minutes", type=float, default=8.0, help="of this call")
    parser.add_argument("--jobs", type=int, default=1, help="commands at the same time; 80 GB hold 4")
    parser.add_argument("--model", default="smollm2-135m", help="base of the target: short name or folder")
    parser.add_argument("--labeller", choices=["greedy", "pad"], default="greedy")
    parser.add_argument("--label-questions", type=int, default=3000)
    parser.add_argument("--label-shards", type=int, default=4, help="jobs that a pair's labels are shared out to")
    parser.add_argument("--tap-layers", default="20,23,26", help="the best by validation is taken")
    parser.add_argument("--questions", type=int, default=4000, help="to calibrate on, and to test on")
    parser.add_argument("--time", type=int, default=20, help="questions that are timed")
    parser.add_argument("--max-loss", type=float, default=0.02)
    parser.add_argument("--confidence", type=float, default=0.95)
    parser.add_argument("--depth", type=int, default=8, help="drafted tokens a round")
    parser.add_argument(
        "--batch", type=int, default=768, help="questions at once; 768 take 14 GB by estimate, 24 in fp32"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float16", help="why is said above; float32 is the most exact")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every job of the stage has a result."""
    args = parse(arguments)
    studies = [Study(pair, args) for pair in args.only]
    stages = STAGES if args.stage == "all" else [stage for stage in STAGES if stage == args.stage]
    found: dict[str, str] = {}
    if stages:
        found = Queue(in_order(studies, stages), args.work, args.jobs).run(60 * args.minutes)
    if args.stage in ("summary", "all"):
        for study in studies:
            summarise(study.pair, list(RULES), SEEDS, args)
    failed = [f"{name}: {outcome}" for name, outcome in found.items() if outcome.startswith("failed")]
    left = [name for name, outcome in found.items() if outcome.startswith(AGAIN)]
    more = [f"{len(left)} jobs are left: {', '.join(left)}; run the same command again"] if left else []
    print("\n".join([*failed, *more]) or DONE)
    return int(bool(failed or left))


if __name__ == "__main__":
    stop_on_sigterm()
    raise SystemExit(main())
