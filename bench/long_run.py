"""Long use: 500 requests one after the other, and an answer of 10,000 tokens: memory is flat, and acceptance steady?

    python bench/long_run.py --questions spec_bench.jsonl --out h100
    python bench/long_run.py --model shape:1b --draft-model shape:1b:4 --drafter draft-model --out h100

Memory is taken at every tenth of either run, with acceptance and speed of that tenth; the card's clocks, temperature,
power and reasons to slow down at the start, between the two, and at the end. A shape has random weights, whose draft
model agrees with it as often as forced.py says; it takes 10,000 tokens, and SmolLM2 the 8,192 that it was made for.
"""

import argparse
import gc
import os
import random
import resource
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import questions
import torch
from forced import segment_lengths, wrong_after
from peers import DEPTH, Job, our_engine, our_models, shape_of
from resume import Parts, measure_parts
from rig import SEED, random_ids
from shapes import shape_config

from pad_engine import Engine, SamplingParams
from pad_engine.captured import Played
from pad_engine.models.loader import LoadedModel

TENTHS = 10
SHORTEST, LONGEST = 16, 515  # tokens of prompts of random ids
FORCED = 3.5  # tokens a round of a shape's draft model
# the last is called otherwise by drivers before 535
CARD = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw", "pstate", "clocks_event_reasons.active")


def card_state() -> dict[str, str] | None:
    """What nvidia-smi says of the card's clocks and heat; None where there is none."""
    for reasons in (CARD[-1], "clocks_throttle_reasons.active"):
        fields = [*CARD[:-1], reasons]
        query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
        try:
            line = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
        except (OSError, subprocess.CalledProcessError, IndexError):
            continue
        return dict(zip(CARD, (value.strip() for value in line.split(",")), strict=True))
    return None


def memory_mb() -> dict[str, float]:
    """What torch holds on the card, the process's memory on the host, and the most that this has been."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    found = {"host": pages * os.sysconf("SC_PAGE_SIZE"), "host_peak": 1024 * peak_kib()}
    if torch.cuda.is_available():
        found |= {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
    return {name: round(count / 1e6, 1) for name, count in found.items()}


def peak_kib() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def tenth(emitted: int, accepted: int, rounds: int, milliseconds: float) -> dict[str, Any]:
    """One tenth of a run, and memory behind it."""
    return {
        "tokens": emitted,
        "mean_accept_length": round(accepted / rounds, 4),
        "ms_per_token": round(milliseconds / emitted, 4),
        "memory_mb": memory_mb(),
    }


def growth(tenths: Sequence[dict[str, Any]]) -> dict[str, float]:
    """MB that the last tenth has beyond the second; what the first use of anything takes is in the first."""
    first, last = tenths[1]["memory_mb"], tenths[-1]["memory_mb"]
    return {name: round(last[name] - first[name], 1) for name in first}


def many_requests(engine: Engine, prompts: Sequence[list[int]], count: int, tokens: int) -> list[dict[str, Any]]:
    """`count` requests, the prompts in turn: tenths of them. count: a multiple of ten."""
    params, tenths = SamplingParams(tokens, ignore_eos=True), []
    for part in range(TENTHS):
        emitted = accepted = rounds = 0
        seconds = 0.0
        for index in range(part * count // TENTHS, (part + 1) * count // TENTHS):
            stats = engine.generate(prompts[index % len(prompts)], params).stats
            emitted, rounds = emitted + stats.completion_tokens, rounds + stats.rounds
            accepted, seconds = accepted + stats.accepted_tokens, seconds + stats.decode_seconds
        gc.collect()
        tenths.append(tenth(emitted, accepted, rounds, 1000 * seconds))
        print("requests", tenths[-1], flush=True)
    return tenths


def long_answer(engine: Engine, prompt: list[int], tokens: int) -> list[dict[str, Any]]:
    """One answer, by tenths of its tokens. A tenth ends with a round."""
    tenths: list[dict[str, Any]] = []
    part: list[Played] = []
    done = 0

    def watch(played: Played) -> None:
        nonlocal done
        part.append(played)
        done += len(played.commit.tokens)
        if done * TENTHS >= tokens * (len(tenths) + 1):
            emitted = sum(len(one.commit.tokens) for one in part)
            accepted = sum(one.commit.accepted for one in part)
            milliseconds = sum(one.draft_ms + one.verify_ms for one in part)
            tenths.append(tenth(emitted, accepted, len(part), milliseconds))
            print("answer", tenths[-1], flush=True)
            part.clear()

    engine.generate(prompt, SamplingParams(tokens, ignore_eos=True), on_round=watch)
    return tenths


def prompts_of(loaded: LoadedModel, path: Path | None, tokens: int) -> list[list[int]]:
    """Spec-Bench's questions that fit, or random ids that end with id 0, with which a segment of forced.py starts."""
    if path is None:
        lengths, vocab = random.Random(SEED), loaded.num_tokens
        most = min(LONGEST, loaded.decoder.max_length - tokens - 1)
        return [[*random_ids(lengths.randint(min(SHORTEST, most), most) - 1, vocab), 0] for _ in range(TENTHS)]
    found = [questions.encoded(loaded, one) for group in questions.load(path).values() for one in group]
    return [ids for ids in found if len(ids) + tokens < loaded.decoder.max_length]


def job_of(args: argparse.Namespace) -> Job:
    """What peers.our_models makes models of."""
    shape = shape_of(args.model)
    length = args.max_length or (args.tokens + LONGEST + 1 if shape else 8192)
    wrong: list[int] = []
    if shape:
        wrong = wrong_after(segment_lengths(FORCED, DEPTH), shape_config(shape[0], length).vocab_size)
    return Job(args.model, args.draft_model, [], args.tokens, length, args.device, args.dtype, tuple(wrong))


def parts_of(engine: Engine, prompts: Sequence[list[int]], args: argparse.Namespace) -> Parts:
    """Both runs, and the card around them."""
    room = min(args.tokens, engine.max_length - len(prompts[0]) - 1)

    def requests(_: object) -> dict[str, Any]:
        tenths = many_requests(engine, prompts, args.requests, args.request_tokens)
        return {"count": args.requests, "growth_mb": growth(tenths), "tenths": tenths}

    def answer(_: object) -> dict[str, Any]:
        tenths = long_answer(engine, prompts[0], room)
        return {"tokens": room, "growth_mb": growth(tenths), "tenths": tenths}

    return {
        ("card", "start"): lambda _: card_state(),
        ("requests",): requests,
        ("card", "middle"): lambda _: card_state(),
        ("answer",): answer,
        ("card", "end"): lambda _: card_state(),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="smollm2-135m", help="or shape:1b for random weights")
    parser.add_argument("--draft-model", default="self:drop=7,13", help="or shape:1b:4 beside a shape")
    parser.add_argument("--drafter", default="ngram", help="draft-model for the draft model")
    parser.add_argument("--questions", type=Path, help="Spec-Bench; random ids without it")
    parser.add_argument("--requests", type=int, default=500, help="a multiple of ten")
    parser.add_argument("--request-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=10000, help="of the long answer, if the context allows")
    parser.add_argument("--max-length", type=int, help="of the cache; by default what the answer needs, or 8192")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", required=True, help="folder of results/ for this card, h100 for instance")
    args = parser.parse_args(arguments)
    if args.requests % TENTHS or args.requests < TENTHS:
        parser.error(f"--requests must be a multiple of {TENTHS}, got {args.requests}")
    loaded, draft = our_models(job_of(args))
    # a shape drafts in every round, so that its acceptance is the forced one whatever the clock says
    engine = our_engine(args.drafter, loaded, draft, fixed_budget=shape_of(args.model) is not None)
    prompts = prompts_of(loaded, args.questions, args.request_tokens)
    name = Path(args.model).stem.replace(":", "-")
    facts = {"model": args.model, "drafter": args.drafter, "draft_model": args.draft_model}
    engine.warm_up(prompts[0])
    measure_parts(f"long-{name}-{args.drafter.partition(':')[0]}", facts, parts_of(engine, prompts, args), args.out)


if __name__ == "__main__":
    main()
