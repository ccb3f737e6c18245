"""The fine-tuned pairs of word problems: one target, and drafters of fewer layers, two of which learnt other wordings.

    python bench/pairs.py target --out pairs          an adapter for SmolLM2-135M: pairs/target
    python bench/pairs.py drafter-easy --out pairs    the target's wording, and small products
    python bench/pairs.py drafter-hard --out pairs    other wordings
    python bench/pairs.py drafter-mixed --out pairs   other wordings in a share of the problems
    python bench/pairs.py all --out pairs --jobs 4    all of them, at the same time

A stage that runs out of its minutes leaves a checkpoint, and the same command goes on from it. Of a stage that is done
only the evaluation is repeated: exact match on fresh questions, decoded greedily by the engine.
`all` runs each stage as a process of its own, with a log in the folder of the models, and repeats nothing that is done.
"""

import argparse
import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
from jobs import DONE, Job, Queue, stop_on_sigterm

from pad_engine import Engine, SamplingParams
from pad_engine.models.loader import load_tokenizer, pick_device
from pad_engine.models.sources import resolve
from pad_engine.training import finetune
from pad_engine.training.tasks.select import make_task
from pad_engine.training.tasks.word_problems import WordProblems

CARD = "training.json"
LORA_RATE, FULL_RATE = 1e-3, 6e-4
DATA_SEED = 1000  # far from the small seeds of labels, calibrations and tests, whose questions are to be fresh
# of SmolLM2-135M's 30: without 0, 1 and 11 hardly anything is left of the model
KEPT = (0, *range(1, 30, 2))


@dataclass(frozen=True)
class Stage:
    """digits, wording: of the problems to learn. whole: all layers and an adapter, else a part and all its weights.
    steps: unless --steps says otherwise."""

    digits: int
    wording: str
    whole: bool = False
    steps: int = 1200

    @property
    def spec(self) -> str:
        """The task to learn, as it is named everywhere."""
        return f"word-problems:digits={self.digits},wording={self.wording}"


STAGES = {
    # 520 steps left it with 83 % of the problems of two digits, 2000 with 99 %
    "target": Stage(2, "a", whole=True, steps=2000),
    # twice as many steps leave drafters with 97 % of the problems that they learnt, and few pivots
    "drafter-easy": Stage(1, "a", steps=400),
    "drafter-hard": Stage(2, "b", steps=540),
    # with other words in 0.3 of the problems greedy verification accepts 5 of 8 tokens, and any rule 6.6 at most
    "drafter-mixed": Stage(2, "mixed:0.5", steps=560),
}


def train(stage: Stage, folder: Path, args: argparse.Namespace) -> bool:
    """Train a stage into its folder; False if the minutes were not enough."""
    base, start = resolve(args.model), time.monotonic()
    settings = finetune.Settings(
        args.steps or stage.steps, args.batch, LORA_RATE if stage.whole else FULL_RATE, seed=args.seed
    )
    torch.manual_seed(args.seed)
    model, tokenizer = finetune.load_base(base), load_tokenizer(base)
    if stage.whole:
        finetune.add_lora(model)
    else:
        finetune.keep_layers(model, args.layers)
    examples = WordProblems(digits=stage.digits, wording=stage.wording).examples("train", seed=DATA_SEED + args.seed)
    progress = finetune.fit(
        model,
        finetune.encode_examples(tokenizer, examples, model.config.vocab_size),
        settings,
        device=pick_device(args.device),
        checkpoint=(checkpoint := args.out / f"{folder.name}.checkpoint"),
        minutes=args.minutes - (time.monotonic() - start) / 60,
    )
    if progress.step < settings.steps:
        print(f"{folder.name}: {progress.step} of {settings.steps} steps are done", flush=True)
        return False
    card: dict[str, Any] = {"base": args.model, "task": stage.spec, "data_seed": DATA_SEED + args.seed}
    if stage.whole:
        finetune.save_lora(model, folder, args.model)
        card["adapter"] = "LoRA"
    else:
        finetune.save_model(model, tokenizer, folder)
        card["layers"] = list(args.layers)
    card |= {**asdict(settings), **asdict(progress)}
    (folder / CARD).write_text(json.dumps(card) + "\n", encoding="utf-8")
    checkpoint.unlink(missing_ok=True)
    return True


def evaluate(stage: Stage, folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Share of right answers to questions that nothing was trained on, by the digits of their factors."""
    model, adapters = (args.model, [folder]) if stage.whole else (folder, [])
    engine = Engine.from_pretrained(model, adapters=adapters, drafter="none", device=args.device, max_length=512)
    right = {}
    for digits in (1, 2):
        task = make_task(f"word-problems:digits={digits}")
        params = SamplingParams(task.max_tokens)
        right[str(digits)] = finetune.exact_match(
            task,
            lambda prompts, params=params: [engine.generate(prompt, params).text for prompt in prompts],
            list(task.questions("test", args.questions, seed=DATA_SEED + args.seed)),
        )
    return right


def run(name: str, args: argparse.Namespace) -> bool:
    """One stage: train what is not trained yet, evaluate, and save the figures; False if it needs another run."""
    stage, folder = STAGES[name], args.out / name
    if not (folder / CARD).is_file() and not train(stage, folder, args):
        return False
    card = json.loads((folder / CARD).read_text(encoding="utf-8"))
    result = {**card, "questions": args.questions, "right_by_digits": evaluate(stage, folder, args)}
    print(f"{name}: {result['right_by_digits']}, {harness.save(f'pairs-{name}', result, args.results)}", flush=True)
    return True


def words_of(name: str, args: argparse.Namespace) -> list[str]:
    """The command line of one stage, with the options of all."""
    options = {key: value for key, value in vars(args).items() if key not in ("stage", "jobs")}
    options["layers"] = ",".join(map(str, args.layers))
    return [name, *(word for key, value in options.items() for word in (f"--{key}", str(value)))]


def run_all(args: argparse.Namespace) -> bool:
    """Every stage as a process of its own; False if one needs another run. Each ends when its minutes are over."""
    jobs = [Job(name, partial(words_of, name, args)) for name in STAGES]
    found = Queue(jobs, args.out, args.jobs, program=[sys.executable, __file__]).run(math.inf)
    return all(outcome.startswith(DONE) for outcome in found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("stage", choices=[*STAGES, "all"])
    parser.add_argument("--out", type=Path, required=True, help="folder of the models")
    parser.add_argument("--results", default="pairs", help="folder of results/ for this machine, or a path")
    parser.add_argument("--model", default="smollm2-135m", help="short name or folder")
    parser.add_argument("--layers", type=lambda text: [int(part) for part in text.split(",")], default=list(KEPT))
    parser.add_argument("--steps", type=int, default=0, help="of training; 0: what the stage says")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="stages of `all` at the same time")
    parser.add_argument("--minutes", type=float, default=7.0, help="of training, a stage and run")
    parser.add_argument("--questions", type=int, default=300, help="to evaluate on")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    if not (run_all(args) if args.stage == "all" else run(args.stage, args)):
        sys.exit("not done yet: run the same command again")


if __name__ == "__main__":
    stop_on_sigterm()
    main()
