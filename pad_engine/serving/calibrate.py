"""`pad calibrate`: the loosest setting of a rule whose harm to a task is certainly small, and a certificate of it.

Next to read: training/calibrate.py for the procedure, evaluate.py for the test that should follow.
"""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pad_engine.errors import RequestError
from pad_engine.files import held, remove_file, write_json
from pad_engine.serving import options, pair
from pad_engine.serving.pair import PairOptions
from pad_engine.serving.terminal import BAD_USAGE, reported

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pad_engine.training.calibrate import Limit, Trial
    from pad_engine.training.evaluate import Setting, Work
    from pad_engine.training.runner import Runner
    from pad_engine.training.tasks.task import Question

SPLIT = "calibration"


def calibrate(
    task: pair.TaskSpec,
    draft_model: pair.DraftModel,
    rule: Annotated[str, typer.Option(help="A relaxed rule without the option that is calibrated.")],
    out: pair.Out,
    model: options.Model = "smollm2-135m",
    max_loss: Annotated[float, typer.Option(help="Share of questions that may be harmed.")] = 0.02,
    confidence: pair.Confidence = 0.95,
    questions: pair.Questions = 4000,
    settings: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Values to test.", show_default="those of the rule")
    ] = None,
    depth: pair.Depth = 8,
    seed: pair.Seed = 0,
    batch: pair.Batch = 64,
    apart: pair.Apart = None,
    answers: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="Of `pad eval` on these questions: what it has of the target is not decoded anew.",
        ),
    ] = None,
    adapter: options.Adapter = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    max_length: options.MaxLength = None,
    accept_terms: options.AcceptTerms = False,
) -> None:
    """Find how far a rule may be relaxed on a task: harm is what the target has right and the rule makes wrong."""
    chosen = PairOptions(
        task, SPLIT, questions, seed, model, draft_model, depth, batch, adapter or [], device, dtype, max_length,
        accept_terms, apart or [], out,
    )  # fmt: skip
    with reported(bad_request=BAD_USAGE):
        from pad_engine.training.calibrate import Limit, certified, check_enough
        from pad_engine.training.results import Results

        limit = Limit(max_loss, confidence)
        check_enough(questions, limit)
        sequence = sequence_of(rule, settings)
        made, asked = chosen.check(list(sequence.values()))
        given = None if answers is None else Results(answers)
        runner = chosen.load()
        references = references_of(runner)
        if given is not None:
            given.check(chosen.compared(made, asked, runner), {one.name: one.facts for one in references})
    with reported(), held(out):
        work = chosen.work(made, asked, runner, rule=rule, sequence=list(sequence.values()), **asdict(limit))
        place = out.with_suffix(".json")
        remove_file(place)  # the certificate of an earlier try must not stand beside a refusal
        if given is not None:
            work.results.take_over(given, [one.name for one in references])
        tested = run(sequence, references, asked, runner, work, limit)
        best = certified(tested, limit)[-1]
        write_json(place, certificate(sequence, best, tested, work, limit))
        print(f"--rule {sequence[best.setting]}")


def sequence_of(rule: str, settings: str | None) -> dict[float, str]:
    """The specs to test by their values, strict to loose."""
    from pad_engine.config import parse_spec
    from pad_engine.training.settings import ordered, sweep_of, with_setting

    sweep = sweep_of(rule)
    if sweep.option in parse_spec(rule, "rule")[1]:
        raise RequestError(f"--rule {rule}: {sweep.option} is what is calibrated", "leave it out, or give --settings")
    return {value: with_setting(rule, sweep.option, value) for value in ordered(sweep, settings)}


def references_of(runner: "Runner") -> "list[Setting]":
    """The target, which rules are compared with; and in types narrower than fp32 greedy verification, which tells what
    rounding alone does."""
    from pad_engine.training.settings import GREEDY, TARGET

    narrow = runner.target.decoder.dtype.itemsize < 4
    return [runner.setting(name) for name in (TARGET, *([GREEDY] if narrow else []))]


def run(
    sequence: dict[float, str], references: "Sequence[Setting]", asked: "Sequence[Question]", runner: "Runner",
    work: "Work", limit: "Limit",
) -> "list[Trial]":  # fmt: skip
    """The settings that were tested, of which only the last may have failed. references: the target, and what shows its
    rounding, if anything."""
    from pad_engine.training.calibrate import check_rounding, run_trials
    from pad_engine.training.evaluate import as_requests

    settings = {value: runner.setting(spec) for value, spec in sequence.items()}
    requests, (target, *lossless) = as_requests(asked, work.task, runner.encode), references
    for setting in lossless:
        check_rounding(target, setting, asked, requests, work, limit)
    tested = run_trials(target, settings, asked, requests, work, limit)
    for one in tested:
        word = "passed" if one.passed else "failed"
        print(f"{sequence[one.setting]}: {one.harms} of {one.questions} harmed, so at most "
              f"{one.harm_upper_bound:.4f}: {word}", file=sys.stderr)  # fmt: skip
    return tested


def certificate(
    sequence: dict[float, str], best: "Trial", tested: "Sequence[Trial]", work: "Work", limit: "Limit"
) -> dict[str, Any]:
    """What is known of the last setting that passed, and how it was found: all that was tested, the one that failed, if
    one did, last."""
    return {
        "rule": sequence[best.setting], **asdict(best), **asdict(limit),
        "tested": [asdict(one) for one in tested],
        "classifier_sha256": work.results.settings[sequence[best.setting]]["classifier"],
        "results": work.results.path.name, "run": work.results.header,
    }  # fmt: skip
