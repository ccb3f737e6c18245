"""`pad generate`: one prompt, the answer streamed to standard output, one line of figures on standard error."""

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pad_engine import chat_template
from pad_engine.config import SamplingParams
from pad_engine.errors import RequestError
from pad_engine.serving import options
from pad_engine.serving.options import EngineOptions, parse_biases, unescape
from pad_engine.serving.reply import answer, figures, show
from pad_engine.serving.terminal import BAD_USAGE, INTERRUPTED, reported

if TYPE_CHECKING:
    from pad_engine.engine import Engine
    from pad_engine.output import Output

# Tokens of the untimed runs before a comparison: enough for plain rounds and for drafted ones.
WARM_UP_TOKENS = 16


def generate(
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
    min_tokens: options.MinTokens = 0,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = None,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    logit_bias: options.LogitBias = None,
    stop: options.Stop = None,
    stop_token_id: options.StopTokenId = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end of the answer.")] = False,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json, so many likeliest tokens at each place.", show_default="none")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message, with --chat.")] = None,
    adapter: options.Adapter = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    weights: options.Weights = "auto",
    draft_weights: options.DraftWeights = "auto",
    max_length: options.MaxLength = None,
    compare_plain: Annotated[
        bool, typer.Option("--compare-plain", help="Decode again without drafting, and compare speed and tokens.")
    ] = False,
    accept_terms: options.AcceptTerms = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Answer one prompt: text to standard output, figures to standard error."""
    chosen = EngineOptions(
        model, draft_model, drafter, trees, rule, budget, adapter or [], device, dtype, max_length, accept_terms,
        weights, draft_weights,
    )  # fmt: skip
    with reported(bad_request=BAD_USAGE):
        if system is not None and not chat:
            raise RequestError("--system needs --chat: only a chat template has a place for it")
        if logprobs is not None and not as_json:
            raise RequestError("--logprobs needs --json: text has no place for them")
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=temperature,
            seed=seed,
            ignore_eos=ignore_eos,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=parse_biases(logit_bias or []),
            stop=[unescape(text) for text in stop or []],
            stop_token_ids=stop_token_id or [],
            logprobs=logprobs,
        )
        chosen.check(params)
        text = read_prompt(prompt)
        if chat:
            chat_template.start()
        engine = chosen.load(verbose=not as_json)
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
            names = {"model": model, "drafter": chosen.drafter_spec}
            print(json.dumps(as_object(out, plain, engine, params, names)))
        else:
            print(summary(out, plain, fresh_seed=seed is None and not params.greedy), file=sys.stderr)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


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


def warm_up(engine: "Engine", ids: list[int], params: SamplingParams) -> None:
    """What is not timed: on a GPU every round that drafts may need, and a request's first tokens."""
    engine.warm_up(ids)
    first_tokens(engine, ids, params)


def first_tokens(engine: "Engine", ids: list[int], params: SamplingParams) -> None:
    """The first few tokens of a request, not timed: the first passes of each size pay for memory and for libraries'
    choices, and on a GPU for kernels and graphs that only such a prompt or such parameters need."""
    count = min(WARM_UP_TOKENS, params.max_tokens)
    engine.generate(ids, replace(params, max_tokens=count, min_tokens=min(count, params.min_tokens)))


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


def summary(out: "Output", plain: "Output | None", fresh_seed: bool) -> str:
    """The line that ends a run."""
    stats = out.stats
    line = figures(stats)
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
