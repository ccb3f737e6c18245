"""`pad generate`: one prompt, the answer streamed to standard output, one line of figures on standard error."""

import json
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pad_engine.config import SamplingParams
from pad_engine.errors import RequestError
from pad_engine.serving.terminal import BAD_USAGE, INTERRUPTED, fetch, reported

if TYPE_CHECKING:
    from pad_engine.engine import Engine
    from pad_engine.output import Output

# Tokens of the untimed runs before a comparison: enough for plain rounds and for drafted ones.
WARM_UP_TOKENS = 16


def generate(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="Text to go on from; - reads it from standard input.")
    ],
    model: Annotated[
        str, typer.Option(help="Short name (see `pad models`), folder, .gguf file or hub id.")
    ] = "smollm2-135m",
    draft_model: Annotated[
        str | None, typer.Option(help='Model that drafts, or "self:drop=3,4": the target without these layers.')
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            help="none, ngram[:min=2,depth=15] or draft-model[:depth=8].", show_default="ngram, or draft-model"
        ),
    ] = None,
    trees: Annotated[str, typer.Option(help="chain or best-first.")] = "chain",
    rule: Annotated[str, typer.Option(help="auto, greedy or match.")] = "auto",
    budget: Annotated[int, typer.Option(min=1, max=64, help="Rows of one pass at most.")] = 16,
    max_tokens: Annotated[int, typer.Option(help="New tokens at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Repeats a sampled answer.", show_default="a fresh one")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end of the answer.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message, with --chat.")] = None,
    adapter: Annotated[list[str] | None, typer.Option(help="LoRA folder to merge; may be given again.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    max_length: Annotated[
        int | None, typer.Option(help="Tokens of prompt and answer together.", show_default="the model's, up to 8192")
    ] = None,
    compare_plain: Annotated[
        bool, typer.Option("--compare-plain", help="Decode again without drafting, and compare speed and tokens.")
    ] = False,
    accept_terms: Annotated[
        bool, typer.Option("--accept-terms", help="Accept the terms that a model is under.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Answer one prompt: text to standard output, figures to standard error."""
    spec = drafter or ("draft-model" if draft_model else "ngram")
    with reported(bad_request=BAD_USAGE):
        if system is not None and not chat:
            raise RequestError("--system needs --chat: only a chat template has a place for it")
        params = SamplingParams(max_tokens, temperature, seed, ignore_eos)
        check_names(spec, draft_model, trees, rule, params, device, dtype)
        text = read_prompt(prompt)

        from pad_engine.models.loader import load_engine

        engine = load_engine(
            fetch(model, accept_terms),
            drafter=spec,
            draft_model=None if draft_model is None else draft_folder(draft_model, accept_terms),
            trees=trees,
            rule=rule,
            device=device,
            dtype=dtype,
            max_length=max_length,
            adapters=adapter or [],
            budget=budget,
            accept_terms=accept_terms,
            verbose=not as_json,
        )
    with reported():
        from pad_engine.prompt import encode

        ids = encode(engine.tokenizer, as_messages(text, system) if chat else text, engine.num_tokens)
        if compare_plain:
            warm_up(engine, ids, params)
        out, interrupted = answer(engine, ids, params, show=None if as_json else show)
        # a comparison must draw the same tokens
        params = replace(params, seed=out.stats.seed)
        if not as_json and out.text and not out.text.endswith("\n"):
            show("\n")
        plain = None
        if compare_plain and not interrupted:
            plain, interrupted = answer_plainly(engine, ids, params)
        if as_json:
            print(json.dumps(as_object(out, plain, engine, params, {"model": model, "drafter": spec})))
        else:
            print(figures(out, plain, fresh_seed=seed is None and not params.greedy), file=sys.stderr)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def check_names(
    drafter: str, draft_model: str | None, trees: str, rule: str, params: SamplingParams, device: str, dtype: str
) -> None:
    """Refuse bad option values before a model is fetched or loaded, which may take minutes."""
    from pad_engine.models.loader import check_drafter, pick_device, pick_dtype
    from pad_engine.rules.select import rule_for

    rule_for(rule, params)
    pick_dtype(dtype, pick_device(device))
    name, _ = check_drafter(drafter, trees, budget=2)
    if name == "draft-model" and draft_model is None:
        raise RequestError("--drafter draft-model needs --draft-model", 'a model, or "self:drop=3,4"')


def read_prompt(prompt: str) -> str:
    """The prompt itself, or standard input without the line break that ends it."""
    if prompt != "-":
        return prompt
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not UTF-8: {error}") from error


def as_messages(text: str, system: str | None) -> list[dict[str, str]]:
    """One turn of a chat."""
    messages = [{"role": "user", "content": text}]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def draft_folder(draft_model: str, accept_terms: bool) -> str:
    """The draft model's folder; `self:...` is no folder and stays what it is."""
    return draft_model if draft_model.startswith("self:") else str(fetch(draft_model, accept_terms))


def show(text: str) -> None:
    """Print a piece of the answer at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def answer(
    engine: "Engine", ids: list[int], params: SamplingParams, show: Callable[[str], None] | None
) -> tuple["Output", bool]:
    """Run a request; returns its output and whether Ctrl-C has ended it.

    The first Ctrl-C ends it after the round at work, so that text and figures are whole. While the prompt is read, or
    at the second Ctrl-C, it ends on the spot, with the text so far.
    """
    from pad_engine.output import Output, Stats

    text, reason = "", "cancelled"
    token_ids: list[int] = []
    stats = Stats(seed=params.seed or 0, prompt_tokens=len(ids))
    signals = 0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal signals
        signals += 1
        if signals > 1 or not token_ids:
            raise KeyboardInterrupt
        engine.cancel()

    deltas = engine.stream(ids, params)
    before = signal.signal(signal.SIGINT, stop)
    try:
        with suppress(KeyboardInterrupt):
            for delta in deltas:
                text += delta.text
                token_ids += delta.token_ids
                stats.completion_tokens = len(token_ids)
                if show:
                    show(delta.text)
                if delta.finish_reason is not None and delta.stats is not None:
                    reason, stats = delta.finish_reason, delta.stats
    finally:
        signal.signal(signal.SIGINT, before)
    return Output(text, token_ids, reason, stats), signals > 0


def warm_up(engine: "Engine", ids: list[int], params: SamplingParams) -> None:
    """A few tokens that are not timed: the first passes of each size pay for memory and for libraries' choices."""
    engine.generate(ids, replace(params, max_tokens=min(WARM_UP_TOKENS, params.max_tokens)))


def answer_plainly(engine: "Engine", ids: list[int], params: SamplingParams) -> tuple["Output", bool]:
    """The same request by plain decoding. The engine stays without a drafter: weights and cache are shared."""
    from pad_engine.controller import Controller
    from pad_engine.drafters.none import NoDrafter

    engine.drafter, engine.controller = NoDrafter(), Controller(1, 0)
    warm_up(engine, ids, params)
    return answer(engine, ids, params, show=None)


def first_difference(a: list[int], b: list[int]) -> int | None:
    """The first index at which two lists differ, or None if they are equal."""
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def figures(out: "Output", plain: "Output | None", fresh_seed: bool) -> str:
    """The line that ends a run."""
    stats = out.stats
    line = (
        f"{stats.completion_tokens} tokens in {stats.decode_seconds:.2f} s: {stats.tokens_per_second:.1f} tokens/s, "
        f"{stats.rounds} rounds, mean accept length {stats.mean_accept_length:.2f}, "
        f"{stats.tokens_per_round:.2f} tokens per round"
    )
    if fresh_seed:
        line += f", seed {stats.seed}"
    if out.finish_reason == "cancelled":
        return f"{line}, cancelled"
    if plain is None:
        return line
    if plain.finish_reason == "cancelled":
        return f"{line}; plain cancelled"
    rate, index = plain.stats.tokens_per_second, first_difference(out.token_ids, plain.token_ids)
    same = "same tokens" if index is None else f"tokens differ from index {index} on"
    return f"{line}; plain {rate:.1f} tokens/s ({stats.tokens_per_second / rate:.2f}x), {same}"


def as_object(
    out: "Output", plain: "Output | None", engine: "Engine", params: SamplingParams, names: dict[str, str]
) -> dict[str, Any]:
    """What --json prints."""
    from pad_engine.rules.select import rule_for

    decoder = engine.target
    dtype = str(decoder.dtype).removeprefix("torch.")
    made_by = {"rule": rule_for(engine.rule, params).name, "device": str(decoder.device), "dtype": dtype}
    fields: dict[str, Any] = out.to_dict() | names | made_by
    if plain is not None:
        fields["plain_tokens_per_second"] = plain.stats.tokens_per_second
        fields["plain_same_tokens"] = out.token_ids == plain.token_ids
    return fields
