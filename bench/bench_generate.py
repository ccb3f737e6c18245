"""Tokens per second of whole requests: plain against transformers, and speculation against plain.

    python bench/bench_generate.py --questions spec_bench.jsonl --dtype float32

Every pair is measured in turns in one run, decoding only, the prompt's own time left out (transformers: the time beyond
a run of one token).
"""

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import harness
import questions
import torch
from transformers import AutoModelForCausalLM

from pad_engine import Engine, SamplingParams
from pad_engine.loader import make_engine
from pad_engine.models.loader import load_model
from pad_engine.models.sources import resolve


def engine_seconds(engine: Engine, ids: list[int], params: SamplingParams) -> float:
    """Seconds of decoding one answer."""
    return engine.generate(ids, params).stats.decode_seconds


def transformers_seconds(model: Any, ids: list[int], tokens: int) -> float:
    """Seconds of decoding, the first token (which transformers takes from the prompt's pass) left out."""

    def run(count: int) -> float:
        prompt = torch.tensor([ids])
        start = time.perf_counter()
        model.generate(
            prompt, attention_mask=torch.ones_like(prompt), min_new_tokens=count, max_new_tokens=count, do_sample=False
        )
        return time.perf_counter() - start

    return (run(tokens) - run(1)) * tokens / (tokens - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--per-group", type=int, default=5)
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--out", default="cpu")
    args = parser.parse_args()

    loaded = load_model(args.model, dtype=args.dtype, device=args.device, max_length=4096, accept_terms=True)
    plain, fast = make_engine(loaded, drafter="none"), make_engine(loaded, drafter=args.drafter)
    edit = questions.encoded(loaded, questions.edit_messages())
    params = SamplingParams(args.tokens, ignore_eos=True)
    results: dict[str, Any] = {
        "model": Path(args.model).stem,
        "dtype": args.dtype,
        "tokens": args.tokens,
        "drafter": args.drafter,
    }

    # the edit's whole answer, which is longer than the other prompts' 64 tokens
    whole = SamplingParams(160)
    runs: dict[str, list[float]] = {"transformers": [], "plain": [], "edit plain": [], "edit drafted": []}
    model = AutoModelForCausalLM.from_pretrained(resolve(args.model, accept_terms=True), dtype=loaded.decoder.dtype)
    model.to(args.device)
    for _ in range(args.repeats):
        runs["transformers"].append(transformers_seconds(model, edit, args.tokens))
        runs["plain"].append(engine_seconds(plain, edit, params))
        runs["edit plain"].append(engine_seconds(plain, edit, whole))
        runs["edit drafted"].append(engine_seconds(fast, edit, whole))
    middle = {name: median(seconds) for name, seconds in runs.items()}
    results["seconds"] = {name: [round(value, 4) for value in seconds] for name, seconds in runs.items()}
    results["plain over transformers"] = round(middle["transformers"] / middle["plain"], 3)
    results["edit over plain"] = round(middle["edit plain"] / middle["edit drafted"], 3)
    print(results, flush=True)

    results["groups"] = {}
    for group, messages in questions.load(args.questions).items():
        chosen = messages[:: max(1, len(messages) // args.per_group)][: args.per_group]
        pairs, accepted, rounds = [], 0, 0
        for question in chosen:
            ids = questions.encoded(loaded, question)
            before, out = engine_seconds(plain, ids, params), fast.generate(ids, params)
            pairs.append((before, out.stats.decode_seconds))
            accepted, rounds = accepted + out.stats.accepted_tokens, rounds + out.stats.rounds
        ratio = sum(before for before, _ in pairs) / sum(after for _, after in pairs)
        results["groups"][group] = {"over plain": round(ratio, 3), "mean_accept_length": round(accepted / rounds, 3)}
        print(group, results["groups"][group], flush=True)
    name = f"generate-{Path(args.model).stem}-{args.dtype}"
    print(harness.save(name, results, args.out))


if __name__ == "__main__":
    main()
