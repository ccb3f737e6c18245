"""`pad eval`: what a task loses and decoding gains under acceptance rules, all on the same questions.

Next to read: training/summary.py for the figures, pair.py for what is shared with `pad calibrate`.
"""

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from pad_engine.files import held, write_json
from pad_engine.serving import options, pair
from pad_engine.serving.pair import PairOptions
from pad_engine.serving.terminal import BAD_USAGE, reported

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pad_engine.forest_request import ForestRequest
    from pad_engine.training.evaluate import Setting, Work
    from pad_engine.training.runner import Runner
    from pad_engine.training.summary import Evaluation


def evaluate(
    task: pair.TaskSpec,
    draft_model: pair.DraftModel,
    rules: Annotated[
        str, typer.Option(metavar="RULE;RULE;...", help="Beside greedy; several values of an option: theta=0.9|0.8.")
    ],
    out: pair.Out,
    model: options.Model = "smollm2-135m",
    split: Annotated[str, typer.Option(help="train, calibration or test.")] = "test",
    questions: pair.Questions = 4000,
    direct: Annotated[
        bool, typer.Option("--direct", help="Also follow each rule without speculation, a token a round.")
    ] = False,
    time: Annotated[int, typer.Option(min=0, help="Time so many questions, one at a time.")] = 0,
    confidence: pair.Confidence = 0.95,
    depth: pair.Depth = 8,
    seed: pair.Seed = 0,
    batch: pair.Batch = 64,
    apart: pair.Apart = None,
    adapter: options.Adapter = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    max_length: options.MaxLength = None,
    accept_terms: options.AcceptTerms = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Compare the target, the draft model, lossless speculation and relaxed rules on a task."""
    chosen = PairOptions(
        task, split, questions, seed, model, draft_model, depth, batch, adapter or [], device, dtype, max_length,
        accept_terms, apart or [], out,
    )  # fmt: skip
    with reported(bad_request=BAD_USAGE):
        from pad_engine.training.evaluate import as_requests
        from pad_engine.training.settings import DIRECT, DRAFT, GREEDY, TARGET, named

        pair.check_confidence(confidence)
        specs = [spec for spec in named(rules) if spec != GREEDY]
        made, asked = chosen.check([GREEDY, *specs])
        runner = chosen.load()
        names = [TARGET, DRAFT, GREEDY, *specs, *(f"{DIRECT}{spec}" for spec in specs if direct)]
        settings = [runner.setting(name) for name in names]
    with reported(), held(out):
        from pad_engine.training.evaluate import answer_each
        from pad_engine.training.summary import evaluation

        work, requests = chosen.work(made, asked, runner), as_requests(asked, made, runner.encode)
        answers = dict(zip(names, answer_each(settings, asked, requests, work), strict=True))
        time_settings(settings, requests[:time], runner, work)
        found = evaluation(answers, specs, confidence)
        report(found, work, as_json)


def time_settings(
    settings: "Sequence[Setting]", requests: "Sequence[ForestRequest]", runner: "Runner", work: "Work"
) -> None:
    """Measure what was not measured before on so many questions and on this machine, and keep it in the results."""
    from pad_engine.serving.info import machine_name
    from pad_engine.training.settings import DIRECT

    here = {"questions": len(requests), "machine": machine_name(runner.target.decoder.device)}
    for setting in settings:
        known = work.results.speeds.get(setting.name, {})
        if requests and not here.items() <= known.items() and not setting.name.startswith(DIRECT):
            work.results.write({"setting": setting.name, **runner.speed(setting, requests), **here})


def report(found: "Evaluation", work: "Work", as_json: bool) -> None:
    """Write the figures and the plot beside the results, and print them."""
    from pad_engine.training.report import markdown, plot

    path, speeds = work.results.path, work.results.speeds
    figures = {"run": work.results.header, **asdict(found), "speeds": speeds}
    write_json(path.with_suffix(".json"), figures)
    if not plot(path.with_suffix(".png"), found):
        print("no plot: matplotlib is not installed (pip install 'pad-engine[plots]')", file=sys.stderr)
    print(json.dumps(figures, allow_nan=False) if as_json else markdown(found, speeds))
