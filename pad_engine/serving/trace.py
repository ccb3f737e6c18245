"""`pad trace`: one answer, and where each of its tokens came from: the draft, an override of the rule, or the target.

On a terminal the text is coloured; `--json` and `--out` give every round with its tree. Next to read: reply.py.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pad_engine import chat_template
from pad_engine.config import SamplingParams
from pad_engine.files import check_place, write_json
from pad_engine.serving import options
from pad_engine.serving.generate import as_messages, read_prompt
from pad_engine.serving.options import EngineOptions, unescape
from pad_engine.serving.reply import answer, figures
from pad_engine.serving.rounds import DRAFT, OVERRIDE, TARGET, as_object
from pad_engine.serving.terminal import BAD_USAGE, INTERRUPTED, reported

if TYPE_CHECKING:
    from pad_engine.captured import Played
    from pad_engine.output import Stats

STYLES = {DRAFT: "green", OVERRIDE: "bold yellow underline", TARGET: "cyan"}
LEGEND = {
    DRAFT: "drafted, and the base rule's own choice",
    OVERRIDE: "drafted, and kept by the relaxed rule alone",
    TARGET: "chosen by the target",
}


def trace(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="Text to go on from; - reads it from standard input.")
    ],
    model: options.Model = "smollm2-135m",
    draft_model: options.DraftModel = None,
    drafter: options.Drafter = None,
    trees: options.Trees = "chain",
    rule: options.Rule = "auto",
    budget: options.Budget = 16,
    max_tokens: options.MaxTokens = 128,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = None,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    stop: options.Stop = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end of the answer.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    adapter: options.Adapter = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    weights: options.Weights = "auto",
    draft_weights: options.DraftWeights = "auto",
    max_length: options.MaxLength = None,
    accept_terms: options.AcceptTerms = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the rounds as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rounds as JSON instead of text.")] = False,
) -> None:
    """Answer one prompt and show which tokens were drafted, overridden and chosen by the target."""
    chosen = EngineOptions(
        model, draft_model, drafter, trees, rule, budget, adapter or [], device, dtype, max_length, accept_terms,
        weights, draft_weights,
    )  # fmt: skip
    with reported(bad_request=BAD_USAGE):
        params = SamplingParams(
            max_tokens, temperature, seed, ignore_eos, top_k=top_k, top_p=top_p, min_p=min_p,
            stop=[unescape(text) for text in stop or []],
        )  # fmt: skip
        if out is not None:
            check_place(out)
        chosen.check(params)
        text = read_prompt(prompt)
        if chat:
            chat_template.start()
        engine = chosen.load(verbose=not as_json)
    with reported():
        from pad_engine.prompt import encode

        ids = encode(engine.tokenizer, as_messages(text, None) if chat else text, engine.num_tokens)
        rounds: list[Played] = []
        answered, interrupted = answer(engine, ids, params, show=None, on_round=rounds.append)
        found = as_object(chosen, engine, params, ids, rounds, answered)
        if out is not None:
            write_json(out, found)
        if as_json:
            print(json.dumps(found, allow_nan=False))
        else:
            show_text(found)
            print(summary(found, answered.stats), file=sys.stderr)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def show_text(found: dict[str, Any]) -> None:
    """The answer in colours, and what they mean."""
    from rich.console import Console
    from rich.text import Text

    console, answer_text, legend = Console(highlight=False), Text(), Text()
    for token in (token for one in found["rounds"] for token in one["emitted"]):
        answer_text.append(token["text"], style=STYLES[token["origin"]])
    console.print(answer_text, soft_wrap=True)
    for origin, meaning in LEGEND.items():
        legend.append(f"\n{origin}", style=STYLES[origin]).append(f": {meaning}")
    console.print(legend, soft_wrap=True)


def summary(found: dict[str, Any], stats: "Stats") -> str:
    """The line that ends a run."""
    counts = ", ".join(f"{count} {origin}" for origin, count in found["totals"]["origins"].items())
    return f"{figures(stats)}; rule {found['request']['rule']}: {counts}"
