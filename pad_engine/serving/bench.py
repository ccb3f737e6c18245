"""`pad bench`: what a model does on this machine, plainly and with a drafter, on a few prompts of our own.

Prompts differ in how much of their answer they hold already, which is what a drafter that copies lives on. One table is
by prompt, the controller deciding; the other by budget and temperature, every round drafting all that it may. Times are
by the engine's own clock; bench/ in the sources measures single kernels and steps. Next to read: bench_rounds.py.
"""

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pad_engine.config import MAX_TEMPERATURE, SamplingParams
from pad_engine.errors import RequestError
from pad_engine.serving import options
from pad_engine.serving.bench_rounds import drafting, measure_rounds, parse_numbers, rounds_table
from pad_engine.serving.generate import first_tokens
from pad_engine.serving.models import PIPED_WIDTH
from pad_engine.serving.options import EngineOptions
from pad_engine.serving.terminal import BAD_USAGE, reported

if TYPE_CHECKING:
    from rich.table import Table

    from pad_engine.engine import Engine
    from pad_engine.output import Stats

TEXT = (
    "The owl left the barn at dusk, crossed the river, and came back before the farmer woke. The farmer never saw the "
    "owl, but he knew that the owl had been there, for in the morning no mouse was left in the barn. "
)
PROMPTS = {
    "copy": f"Copy this text word by word, and then once more.\n\n{TEXT}\n\nCopy:\n\nThe owl left the barn at dusk,",
    "list": "The numbers from one to forty, each on a line of its own:\n\none\ntwo\nthree\nfour\nfive\nsix\n",
    "story": "It was late in autumn when the last ship of the year came into the harbour. The captain stood",
    "long": TEXT * 12 + "\n\nIn one sentence, the text says that",
}


@dataclass(frozen=True)
class Run:
    """One prompt, decoded plainly and with the drafter."""

    prompt: str
    plain: "Stats"
    drafted: "Stats"
    same_tokens: bool


def bench(
    model: options.Model = "smollm2-135m",
    draft_model: options.DraftModel = None,
    drafter: options.Drafter = None,
    trees: options.Trees = "chain",
    budget: options.Budget = 16,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens a prompt.")] = 64,
    temperature: options.Temperature = 0.0,
    budgets: Annotated[str, typer.Option(help="Of the second table; 1 is plain decoding.")] = "1,4,8,16,32,64",
    temperatures: Annotated[str, typer.Option(help="Of the second table.")] = "0,1",
    adapter: options.Adapter = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    weights: options.Weights = "auto",
    draft_weights: options.DraftWeights = "auto",
    max_length: options.MaxLength = None,
    accept_terms: options.AcceptTerms = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Measure a model on this machine: prefill, plain steps, and drafted rounds on a few built-in prompts."""
    chosen = EngineOptions(
        model, draft_model, drafter, trees, "auto", budget, adapter or [], device, dtype, max_length, accept_terms,
        weights, draft_weights,
    )  # fmt: skip
    with reported(bad_request=BAD_USAGE):
        params = SamplingParams(tokens, temperature=temperature, seed=0, ignore_eos=True)
        chosen.check(params)
        sizes = parse_numbers(budgets, "--budgets", int, 1, 64)
        heats = parse_numbers(temperatures, "--temperatures", float, 0, MAX_TEMPERATURE)
        engine = chosen.load(verbose=not as_json)
        if tokens + 2 > engine.max_length:
            raise RequestError(f"{tokens} new tokens and a prompt do not fit a context of {engine.max_length}")
    with reported():
        prompts = encoded_prompts(engine, tokens)
        runs = measure(engine, prompts, params)
        rounds = measure_rounds(engine, prompts, sizes, heats, tokens)
        if as_json:
            named = {"model": model, "drafter": chosen.drafter_spec}
            print(json.dumps(as_object(engine, runs, named) | {"rounds": rounds}))
        else:
            show(prompts_table(engine, runs, f"{model}, drafter {chosen.drafter_spec}"), rounds_table(rounds))


def encoded_prompts(engine: "Engine", tokens: int) -> list[list[int]]:
    """The prompts' ids, cut where an answer of so many tokens would not fit behind them."""
    from pad_engine.prompt import encode

    room = engine.max_length - tokens
    return [encode(engine.tokenizer, text, engine.num_tokens)[:room] for text in PROMPTS.values()]


def measure(engine: "Engine", prompts: list[list[int]], params: SamplingParams) -> list[Run]:
    """Every prompt twice: the drafter's requests first, then the plain ones. Ahead of all what an engine does before it
    serves requests, or their times would hold what it captures, and what it pays to see whether drafts pay."""
    engine.warm_up(prompts[0])
    drafted = [timed(engine, ids, params) for ids in prompts]
    with drafting(engine, 1):
        plain = [timed(engine, ids, params) for ids in prompts]
    pairs = zip(PROMPTS, plain, drafted, strict=True)
    return [Run(name, before[0], after[0], before[1] == after[1]) for name, before, after in pairs]


def timed(engine: "Engine", ids: list[int], params: SamplingParams) -> tuple["Stats", list[int]]:
    """The figures and tokens of a request, behind its first ones, which are not timed."""
    first_tokens(engine, ids, params)
    out = engine.generate(ids, params)
    return out.stats, out.token_ids


def row(name: str, plain: "Stats", drafted: "Stats", same_tokens: bool) -> dict[str, Any]:
    """The figures of one prompt, or of all of them. Times in milliseconds."""
    return {
        "prompt": name,
        "prompt_tokens": plain.prompt_tokens,
        "prefill_ms": 1000 * plain.prefill_seconds,
        "first_token_ms": 1000 * plain.time_to_first_token,
        "plain_step_ms": 1000 * plain.decode_seconds / plain.rounds,
        "plain_tokens_per_second": plain.tokens_per_second,
        "tokens_per_second": drafted.tokens_per_second,
        "over_plain": drafted.tokens_per_second / plain.tokens_per_second,
        "rounds": drafted.rounds,
        "draft_tokens": drafted.draft_tokens,
        "mean_accept_length": drafted.mean_accept_length,
        "tokens_per_round": drafted.tokens_per_round,
        "same_tokens": same_tokens,
    }


def total(stats: list["Stats"]) -> "Stats":
    """Counts and seconds of several requests as those of one."""
    from pad_engine.output import Stats

    counts = ("prompt_tokens", "completion_tokens", "rounds", "draft_tokens", "accepted_tokens")
    times = ("prefill_seconds", "time_to_first_token", "decode_seconds")
    return Stats(**{name: sum(getattr(s, name) for s in stats) for name in (*counts, *times)})


def rows(runs: list[Run]) -> list[dict[str, Any]]:
    """One row a prompt, and one of all together, whose times of prompt and first token are sums."""
    found = [row(run.prompt, run.plain, run.drafted, run.same_tokens) for run in runs]
    plain, drafted = total([run.plain for run in runs]), total([run.drafted for run in runs])
    return [*found, row("all", plain, drafted, all(run.same_tokens for run in runs))]


def as_object(engine: "Engine", runs: list[Run], names: dict[str, str]) -> dict[str, Any]:
    """What --json prints: the rows, and what they were measured on."""
    from pad_engine.serving.info import machine_facts

    *prompts, together = rows(runs)
    dtype = str(engine.target.dtype).removeprefix("torch.")
    made_by = {"device": str(engine.target.device), "dtype": dtype, "tokens": runs[0].plain.completion_tokens}
    return names | made_by | {"machine": machine_facts(), "prompts": prompts, "all": together}


def prompts_table(engine: "Engine", runs: list[Run], title: str) -> "Table":
    """The same for people."""
    from rich import box
    from rich.table import Table

    dtype = str(engine.target.dtype).removeprefix("torch.")
    table = Table(title=f"{title}, {dtype} on {engine.target.device}", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("prompt", "tokens", "prefill ms", "first token ms", "plain ms/token", "plain tokens/s", "tokens/s"):
        table.add_column(name, justify="left" if name == "prompt" else "right")
    for name in ("over plain", "rounds", "accepted/round", "tokens/round", "same tokens"):
        table.add_column(name, justify="right")
    for found in rows(runs):
        table.add_row(
            found["prompt"],
            str(found["prompt_tokens"]),
            f"{found['prefill_ms']:.1f}",
            f"{found['first_token_ms']:.1f}",
            f"{found['plain_step_ms']:.2f}",
            f"{found['plain_tokens_per_second']:.1f}",
            f"{found['tokens_per_second']:.1f}",
            f"{found['over_plain']:.2f}x",
            str(found["rounds"]),
            f"{found['mean_accept_length']:.2f}",
            f"{found['tokens_per_round']:.2f}",
            "yes" if found["same_tokens"] else "no",
        )
    return table


def show(*tables: "Table") -> None:
    """One below the other."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    for table in tables:
        console.print(table)
