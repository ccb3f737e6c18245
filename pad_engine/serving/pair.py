"""What `pad calibrate` and `pad eval` share: the options of a pair and its questions, and how they become a file of
results. Next to read: calibrate.py, evaluate.py."""

import atexit
import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pad_engine.errors import RequestError
from pad_engine.files import check_place
from pad_engine.serving.options import EngineOptions

if TYPE_CHECKING:
    from pad_engine.training.evaluate import Work
    from pad_engine.training.runner import Runner
    from pad_engine.training.tasks.task import Question, Task

TaskSpec = Annotated[
    str, typer.Option("--task", help="gsm8k:path=FILE, word-problems, ... or module:attribute of your own.")
]
DraftModel = Annotated[
    str, typer.Option(help='Model that drafts, or "self:drop=3,4": the target without these layers.')
]
Questions = Annotated[int, typer.Option(min=1, help="How many questions of the split.")]
Depth = Annotated[int, typer.Option(min=1, max=63, help="Drafted tokens a round.")]
Batch = Annotated[int, typer.Option(min=1, help="Questions decoded at once.")]
Seed = Annotated[int, typer.Option(help="Of the choice of questions.")]
Confidence = Annotated[float, typer.Option(help="Of bounds and intervals.")]
Apart = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE", help="Labels, results or a classifier's .json: none of its questions may come; may be repeated."
    ),
]
Out = Annotated[
    Path, typer.Option(metavar="FILE.jsonl", help="Answers are kept here; the same command goes on from them.")
]


@dataclass(frozen=True)
class PairOptions:
    """A pair, its questions and its file, as they were typed."""

    task: str
    split: str
    questions: int
    seed: int
    model: str
    draft_model: str
    depth: int
    batch: int
    adapters: Sequence[str]
    device: str
    dtype: str
    max_length: int | None
    accept_terms: bool
    apart: Sequence[Path]
    out: Path

    @property
    def engine_options(self) -> EngineOptions:
        """The options of the two models."""
        return EngineOptions(
            self.model, self.draft_model, None, "chain", "auto", self.depth + 1, self.adapters, self.device,
            self.dtype, self.max_length, self.accept_terms,
        )  # fmt: skip

    def check(self, specs: Sequence[str]) -> "tuple[Task, list[Question]]":
        """Refuse bad values, and questions that were used before, ahead of loading models. specs: of the rules. Returns
        the task and its questions."""
        from pad_engine.config import SamplingParams
        from pad_engine.training.baselines import make_any_rule
        from pad_engine.training.evaluate import draw
        from pad_engine.training.tasks.select import make_task

        if self.out.suffix != ".jsonl":
            raise RequestError(f"--out must end in .jsonl, got {self.out}")
        check_place(self.out)
        self.engine_options.check(SamplingParams())
        for spec in specs:
            make_any_rule(spec, num_tokens=2)
        task = make_task(self.task)
        questions = draw(task, self.split, self.questions, self.seed)
        self.check_apart(questions, specs)
        return task, questions

    def check_apart(self, questions: "Sequence[Question]", specs: Sequence[str]) -> None:
        """Refuse questions that a classifier of the rules, or a file of --apart, has seen."""
        from pad_engine.training.apart import check_apart, classifier_of, trained_on, used_questions

        used = {str(path): used_questions(path) for path in self.apart}
        for path in {path for spec in specs if (path := classifier_of(spec))}:
            used[str(path)] = trained_on(path)
            if not used[str(path)]:
                print(f"warning: {path} does not name the questions it was trained on; --apart can", file=sys.stderr)
        check_apart((question.id for question in questions), self.split, used)

    def load(self) -> "Runner":
        """Fetch and load both models."""
        from torch.backends import cuda

        from pad_engine.forest import make_pair
        from pad_engine.serving.terminal import fetch
        from pad_engine.training.runner import Runner

        target, draft = fetch(self.model, self.accept_terms), self.engine_options.draft_folder()
        made = make_pair(
            target, draft, device=self.device, dtype=self.dtype, max_length=self.max_length, adapters=self.adapters,
            accept_terms=self.accept_terms, verbose=True,
        )  # fmt: skip
        assert made.draft is not None, "--draft-model is required"
        # else the library may sum parts of a product in the models' type, more of them in a pass of more rows, and in
        # fp16 such sums may overflow where the product does not
        cuda.matmul.allow_fp16_reduced_precision_reduction = False
        cuda.matmul.allow_bf16_reduced_precision_reduction = False
        # a forest makes many objects that live for a round, and each time that makes Python look for garbage it would
        # look through all that is loaded, which stays
        gc.freeze()
        atexit.register(gc.unfreeze)
        return Runner(made, made.draft, self.depth, self.batch, self.digests(target, draft))

    def digests(self, target: Path, draft: str | None) -> dict[str, Any]:
        """Of the files of the pair, by models/digest.py. A draft model that is the target without some layers has none
        of its own."""
        from pad_engine.models.digest import adapter_digest, model_digest

        own = draft is not None and not draft.startswith("self:")
        return {
            "model_digest": model_digest(target),
            "adapter_digests": [adapter_digest(Path(adapter).expanduser()) for adapter in self.adapters],
            "draft_model_digest": model_digest(Path(draft)) if draft is not None and own else None,
        }

    def facts(self, task: "Task", runner: "Runner") -> dict[str, Any]:
        """What all lines of a file made with these options have in common, as its header holds it. What the options
        stand for is in `contents`."""
        decoder = runner.target.decoder
        return {
            "task": self.task, "split": self.split, "questions": self.questions, "max_tokens": task.max_tokens,
            "model": self.model, "adapters": list(self.adapters), "draft_model": self.draft_model,
            "max_length": decoder.max_length, "dtype": str(decoder.dtype).removeprefix("torch."),
            "device": decoder.device.type,
        }  # fmt: skip

    def contents(self, questions: "Sequence[Question]", runner: "Runner") -> dict[str, Any]:
        """What the models and the questions are, whatever their names: the last of a header, as an error names the
        first difference, and an option that differs says more than a digest."""
        from pad_engine.training.evaluate import questions_digest

        return {**runner.digests, "questions_digest": questions_digest(questions)}

    def compared(self, task: "Task", questions: "Sequence[Question]", runner: "Runner") -> dict[str, Any]:
        """What decides answers, as the header of a file of results holds it."""
        return self.facts(task, runner) | {"seed": self.seed, "depth": self.depth} | self.contents(questions, runner)

    def work(self, task: "Task", questions: "Sequence[Question]", runner: "Runner", **more: Any) -> "Work":
        """The file of results, and what fills it. more: what the command's own options add to the file's header."""
        from pad_engine.serving.info import machine_facts
        from pad_engine.training.evaluate import Work
        from pad_engine.training.results import Results

        header = self.compared(task, questions, runner) | {**more, "machine": machine_facts()}
        return Work(task, runner.decode, runner.text_of, Results(self.out, header), show_progress)


def check_confidence(confidence: float) -> None:
    """RequestError unless it is a probability."""
    if not 0 < confidence < 1:
        raise RequestError(f"confidence must be in (0, 1), got {confidence}")


def show_progress(setting: str, done: int, count: int) -> None:
    """A line on standard error: on a terminal it is rewritten, elsewhere it comes when a setting is done."""
    line = f"{setting}: {done} of {count} questions"
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="\n" if done == count else "", file=sys.stderr, flush=True)
    elif done == count:
        print(line, file=sys.stderr)
