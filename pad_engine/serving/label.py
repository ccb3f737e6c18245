"""`pad label`: which of a draft model's mismatched tokens matter for a task's result, as training data of a classifier.

Next to read: training/labels.py for what a label is, pair.py for what is shared with `pad eval`.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pad_engine.errors import RequestError
from pad_engine.files import check_place, held
from pad_engine.serving import options, pair
from pad_engine.serving.pair import PairOptions
from pad_engine.serving.terminal import BAD_USAGE, reported

if TYPE_CHECKING:
    from pad_engine.training.labels import LabelSettings
    from pad_engine.training.runner import Runner
    from pad_engine.training.tasks.task import Question, Task


def label(
    task: pair.TaskSpec,
    draft_model: pair.DraftModel,
    out: Annotated[Path, typer.Option(metavar="FILE.jsonl", help="Labels; the same command goes on from them.")],
    model: options.Model = "smollm2-135m",
    split: Annotated[str, typer.Option(help="train, calibration or test.")] = "train",
    questions: pair.Questions = 1000,
    labeller: Annotated[
        str, typer.Option(help="pad: rollouts from both tokens; greedy: one greedy run from the draft's.")
    ] = "pad",
    rollouts: Annotated[int, typer.Option(min=1, help="Of pad, from each of the two tokens.")] = 20,
    temperature: Annotated[float, typer.Option(help="Of these rollouts.")] = 0.7,
    drop: Annotated[
        str, typer.Option(help="When utility has dropped: ratio:A, difference:A or threshold:A.")
    ] = "ratio:0.9",
    min_utility: Annotated[float, typer.Option(help="Pad discards questions that the target solves no oftener.")] = 0.3,
    seed: Annotated[int, typer.Option(help="Of the choice of questions and of all rollouts.")] = 0,
    shard: Annotated[str, typer.Option(metavar="K/N", help="Every N-th question, from the K-th on.")] = "1/1",
    ray: Annotated[
        int | None, typer.Option(min=1, help="So many shards on a Ray cluster, put together in the end.")
    ] = None,
    depth: Annotated[
        int, typer.Option(min=0, max=63, help="Drafted tokens a round of a continuation, which stay the target's own.")
    ] = 8,
    batch: Annotated[int, typer.Option(min=1, help="Continuations decoded at once.")] = 64,
    parallel: Annotated[
        int | None, typer.Option(min=1, help="Questions at work at most.", show_default="twice the batch")
    ] = None,
    adapter: options.Adapter = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    max_length: options.MaxLength = None,
    accept_terms: options.AcceptTerms = False,
) -> None:
    """Label the tokens at which a draft model and its target disagree: do they change the task's result?"""
    chosen = PairOptions(
        task, split, questions, seed, model, draft_model, depth, batch, adapter or [], device, dtype, max_length,
        accept_terms, [], out,
    )  # fmt: skip
    with reported(bad_request=BAD_USAGE):
        from pad_engine.training.labels import LabelSettings

        settings = LabelSettings(labeller, rollouts, temperature, drop, min_utility, seed)
        first, every = parse_shard(shard)
        if ray is not None and every > 1:
            raise RequestError("--ray makes shards of its own: leave --shard out")
        chosen.check([])
    with reported():
        if ray is None:
            label_shard(chosen, settings, parallel, first, every)
        else:
            label_by_ray(chosen, settings, parallel, ray)
        print(summary(out), file=sys.stderr)


def label_shard(chosen: PairOptions, settings: "LabelSettings", parallel: int | None, first: int, every: int) -> Path:
    """Label every so many-th question, from the first on; returns the file."""
    from pad_engine.training.label_run import label_questions
    from pad_engine.training.label_store import LabelStore

    task, asked = chosen.check([])
    runner, mine = chosen.load(), asked[first - 1 :: every]
    header = header_of(chosen, task, asked, runner, settings, f"{first}/{every}")
    with held(chosen.out):
        store = LabelStore(chosen.out, header)
        with progress_bar(len(mine), sum(one.id in store.done for one in mine)) as advance:
            label_questions(runner, task, mine, settings, store, parallel=parallel, progress=advance)
    return chosen.out


def label_by_ray(chosen: PairOptions, settings: "LabelSettings", parallel: int | None, shards: int) -> None:
    """Label all questions in shards on a cluster. Their files stand beside the one of all."""
    from pad_engine.models.loader import pick_device
    from pad_engine.training.label_store import merge_labels as merge
    from pad_engine.training.ray_labels import run_shards

    place = chosen.out.resolve()

    def run(number: int) -> Path:
        own = replace(chosen, out=place.with_name(f"{place.stem}-{number}-of-{shards}{place.suffix}"))
        return label_shard(own, settings, parallel, number, shards)

    parts = run_shards(run, shards, num_gpus=float(pick_device(chosen.device).type == "cuda"))
    merge(chosen.out, parts)


def merge_labels(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file of all labels.")],
    parts: Annotated[list[Path], typer.Argument(metavar="PART...", help="Files of all of one run's shards.")],
) -> None:
    """Put the labels of all shards of a run into one file."""
    with reported():
        from pad_engine.training.label_store import merge_labels as merge

        check_place(out)
        merge(out, parts)
        print(summary(out), file=sys.stderr)


def parse_shard(text: str) -> tuple[int, int]:
    """K/N."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise RequestError(f"--shard must be K/N with 1 <= K <= N, got {text!r}")
    return int(match[1]), int(match[2])


def header_of(
    chosen: PairOptions,
    task: "Task",
    asked: "Sequence[Question]",
    runner: "Runner",
    settings: "LabelSettings",
    shard: str,
) -> dict[str, Any]:
    """What all labels of a file have in common; `machine` may change between runs. asked: the questions of all
    shards."""
    from pad_engine.serving.info import machine_facts

    facts = chosen.facts(task, runner) | {"depth": chosen.depth} | asdict(settings)
    return facts | {"shard": shard, **chosen.contents(asked, runner), "machine": machine_facts()}


def summary(path: Path) -> str:
    """What a file of labels holds, and how many questions gave none or stopped, and why."""
    from pad_engine.training.label_file import read_finished

    _, labels, reasons = read_finished(path)
    early: Counter[str] = Counter()
    for reason, count in reasons.items():
        if reason != "finished":
            early[re.sub(r" [\d.]+$", "", reason)] += count  # without the utility itself
    why = "".join(f"; {count} {reason}" for reason, count in early.items())
    pivots = sum(one.pivot for one in labels)
    return f"{len(labels)} labels of {reasons.total()} questions, {pivots} of them pivots{why}: {path}"


@contextmanager
def progress_bar(count: int, done: int) -> Iterator[Callable[[], None]]:
    """Finished questions and the time left, on a terminal only; gives what is called with each question."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("questions"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        bar = progress.add_task("questions", total=count, completed=done)
        yield lambda: progress.advance(bar)
