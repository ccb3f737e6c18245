"""This engine beside what pip can install, on the same prompts and weights in one call: tokens per second of decoding.

    python bench/bench_peers.py --questions spec_bench.jsonl --out h100
    python bench/bench_peers.py --shapes 1b+1b:4 --out h100

Real text by SmolLM2 and a self-draft; or random weights of a shape, whose draft model agrees with it as often as
forced.py says, for every peer alike. Each peer is a process of its own (peers.py), so that one that fails, runs out of
memory or takes too long is a line of the result and not its end.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import questions
from bench_round import FORCED, OTHERS, parse_pair
from forced import segment_lengths, wrong_after
from peers import DEPTH, PEERS, Job
from resume import measure_parts
from rig import random_ids
from shapes import shape_config

from pad_engine.models.loader import load_tokenizer
from pad_engine.models.sources import resolve

CONTEXT, MAX_LENGTH = 256, 2048
OURS = "pad plain"


def shape_job(pair: str, tokens: int, **options: Any) -> Job:
    """A pair of shapes, and one prompt that ends with id 0."""
    target, draft, layers = parse_pair(pair)
    vocab = shape_config(target, MAX_LENGTH).vocab_size
    lengths = segment_lengths(FORCED.get(pair, OTHERS), DEPTH)
    name = f"shape:{draft}" + (f":{layers}" if layers else "")
    wrong = tuple(wrong_after(lengths, vocab))
    prompts = [[*random_ids(CONTEXT, vocab), 0]]
    return Job(f"shape:{target}", name, prompts, tokens, MAX_LENGTH, wrong=wrong, **options)


def text_job(model: str, draft: str, path: Path, per_group: int, tokens: int, **options: Any) -> Job:
    """Spec-Bench questions, evenly spaced in each group."""
    tokenizer = load_tokenizer(resolve(model, accept_terms=True))
    prompts = [
        (group, questions.encoded_by(tokenizer, question, len(tokenizer)))
        for group, chosen in questions.chosen(path, per_group).items()
        for question in chosen
    ]
    fit = [(group, ids) for group, ids in prompts if len(ids) + tokens < MAX_LENGTH]
    groups = tuple(group for group, _ in fit)
    return Job(model, draft, [ids for _, ids in fit], tokens, MAX_LENGTH, groups=groups, **options)


def run_peer(peer: str, job: Job, seconds: int) -> dict[str, Any]:
    """What the peer's process printed, or why it did not."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(asdict(job)), encoding="utf-8")
        command = [sys.executable, str(Path(__file__).parent / "peers.py"), peer, str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return {"error": f"took more than {seconds} s"}
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return {"error": lines[-1] if lines else f"exit code {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def result(peer: str, job: Job, seconds: int, found: dict[str, Any]) -> dict[str, Any]:
    """A peer on a job. found: the results before it. over_pad_plain: how many times as fast as our plain decoding;
    equal_answers: to it. answers: what tells them apart."""
    own = run_peer(peer, job, seconds)
    if "error" not in own:
        own["answers"] = [hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16] for ids in own["answers"]]
        base = own if peer == OURS else found.get("peers", {}).get(OURS, {"error": "not run"})
        if "error" not in base:
            own["over_pad_plain"] = round(own["tokens_per_second"] / base["tokens_per_second"], 4)
            equal = sum(one == other for one, other in zip(own["answers"], base["answers"], strict=True))
            own["equal_answers"] = f"{equal} of {len(job.prompts)}"
    print(job.model, peer, own, flush=True)
    return own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--questions", type=Path, help="Spec-Bench, for real text")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft-model", default="self:drop=7,13")
    parser.add_argument("--per-group", type=int, default=1)
    parser.add_argument("--shapes", nargs="*", default=[], help="pairs such as 1b+1b:4")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--limit", type=int, default=400, help="seconds that a peer may take")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", required=True, help="folder of results/ for this card, h100 for instance")
    args = parser.parse_args()
    options = {"device": args.device, "dtype": args.dtype}
    jobs = {f"peers-{pair.replace('+', '-').replace(':', '-')}": shape_job(pair, args.tokens, **options)
            for pair in args.shapes}  # fmt: skip
    if args.questions:
        name = f"peers-{Path(args.model).stem}"
        jobs[name] = text_job(args.model, args.draft_model, args.questions, args.per_group, args.tokens, **options)
    if not jobs:
        parser.error("nothing to do: give --questions, --shapes or both")
    for name, job in jobs.items():
        facts = {"model": Path(job.model).name, "draft": job.draft, "prompts": len(job.prompts), "tokens": job.tokens}
        parts = {("peers", peer): partial(result, peer, job, args.limit) for peer in args.peers}
        measure_parts(name, facts, parts, args.out)


if __name__ == "__main__":
    main()
