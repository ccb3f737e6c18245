"""Is speculative output equal to plain output, id for id, on a real model?

    python bench/equality.py --questions spec_bench.jsonl --model smollm2-135m

Greedy: every drafter against transformers' own greedy decoding, from the same safetensors. Match: every drafter, tree
and budget against plain sampling with the same seed. In fp32 on a CPU everything must be equal.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import questions
import torch
from transformers import AutoModelForCausalLM

from pad_engine import Engine, SamplingParams
from pad_engine.loader import make_engine
from pad_engine.models.loader import LoadedModel, load_model
from pad_engine.models.sources import resolve

GREEDY = [
    {"drafter": "none"},
    {"drafter": "ngram"},
    {"drafter": "draft-model:depth=5", "trees": "chain"},
    {"drafter": "draft-model:depth=5", "trees": "best-first"},
]
MATCH = [
    {"drafter": drafter, "trees": trees, "budget": budget}
    for drafter in ("ngram", "draft-model:depth=5")
    for trees in ("chain", "best-first")
    for budget in (4, 16)
]


def engine_for(loaded: LoadedModel, variant: dict[str, Any], draft_model: str, fixed: bool) -> Engine:
    """An engine of one variant; draft_model is only used by the draft-model drafter."""
    options = dict(variant)
    if options["drafter"].startswith("draft-model"):
        options["draft_model"] = draft_model
    return make_engine(loaded, fixed_budget=fixed, **options)


def greedy_oracle(folder: Path, prompts: list[list[int]], tokens: int, loaded: LoadedModel) -> list[list[int]]:
    """What transformers generates, on the same device and in the same type."""
    decoder = loaded.decoder
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=decoder.dtype).to(decoder.device)
    answers = []
    for ids in prompts:
        prompt = torch.tensor([ids], device=decoder.device)
        mask = torch.ones_like(prompt)
        out = model.generate(prompt, attention_mask=mask, max_new_tokens=tokens, do_sample=False)
        answers.append(out[0, len(ids) :].tolist())
    return answers


def gap_at(plain: Engine, ids: list[int], params: SamplingParams, index: int) -> float:
    """How far the plain run's likeliest token was ahead of the next at a place of its answer, in nats."""
    logprobs = plain.generate(ids, replace(params, logprobs=2)).logprobs
    assert logprobs is not None
    (_, first), (_, second) = logprobs[min(index, len(logprobs) - 1)].top
    return round(first - second, 4)


def compare(
    engine: Engine, plain: Engine, prompts: list[list[int]], expected: list[list[int]], params: list[SamplingParams]
) -> dict[str, Any]:
    """Answer every prompt and list where an answer first differs from what was expected, with the gap there."""
    differences, accepted, rounds = [], 0, 0
    for i, (ids, want, p) in enumerate(zip(prompts, expected, params, strict=True)):
        out = engine.generate(ids, p)
        accepted += out.stats.accepted_tokens
        rounds += out.stats.rounds
        if out.token_ids != want:
            pairs = zip(out.token_ids + [-1], want + [-1], strict=False)
            at = next(k for k, (a, b) in enumerate(pairs) if a != b)
            differences.append({"prompt": i, "at": at, "gap": gap_at(plain, ids, p, at)})
    return {"equal": len(prompts) - len(differences), "of": len(prompts), "differences": differences,
            "mean_accept_length": round(accepted / rounds, 3)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft-model", default="self:drop=7,13")
    parser.add_argument("--oracle", choices=["transformers", "plain"], default="transformers", help="at temperature 0")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.0, 0.7, 1.0])
    parser.add_argument("--suffix", default="", help="appended to the name of the result file")
    parser.add_argument("--out", default="cpu")
    args = parser.parse_args()

    loaded = load_model(args.model, dtype=args.dtype, device=args.device, max_length=4096, accept_terms=True)
    prompts = [questions.encoded(loaded, question) for question in questions.spread(args.questions, args.prompts)]
    results: dict[str, Any] = {"model": Path(args.model).stem, "dtype": args.dtype, "tokens": args.tokens, "runs": []}
    plain = engine_for(loaded, {"drafter": "none"}, args.draft_model, False)
    for temperature in args.temperatures:
        params = [SamplingParams(args.tokens, temperature=temperature, seed=seed) for seed in range(len(prompts))]
        if temperature == 0 and args.oracle == "transformers":
            expected = greedy_oracle(resolve(args.model, accept_terms=True), prompts, args.tokens, loaded)
        else:
            expected = [plain.generate(ids, p).token_ids for ids, p in zip(prompts, params, strict=True)]
        for variant in GREEDY if temperature == 0 else MATCH:
            found = compare(engine_for(loaded, variant, args.draft_model, True), plain, prompts, expected, params)
            results["runs"].append({"temperature": temperature, **variant, **found})
            print(results["runs"][-1], flush=True)
    path = harness.save(
        f"equality-{Path(args.model).stem}-{args.device}-{args.dtype}{args.suffix}",
        results,
        args.out,
    )
    print(path)


if __name__ == "__main__":
    main()
