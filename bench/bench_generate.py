"""Tokens per second of whole requests: plain against transformers, and drafters against plain.

    python bench/bench_generate.py --questions spec_bench.jsonl --dtype float32
    python bench/bench_generate.py --questions spec_bench.jsonl --device cuda --dtype bfloat16 \\
        --drafters ngram draft-model:depth=4 --draft-model self:drop=7,13 --out h100

Every pair is measured in turns in one run, decoding only, the prompt's own time left out (transformers: the time beyond
a run of one token). Beside the Spec-Bench groups two that a drafter gains nothing from: random ids, and texts whose
lookups nearly always find something and nearly always miss. bench_peers.py has the other peers.
"""

import argparse
import random
from pathlib import Path
from statistics import median
from typing import Any

import questions
from compare import compare
from peers import decode_seconds, generates, load_transformers
from resume import Parts, measure_parts

from pad_engine import Engine, SamplingParams
from pad_engine.loader import make_engine
from pad_engine.models.loader import LoadedModel, load_model

SEED = 7
# of the texts that miss: random tokens of a small alphabet, long enough to hold nearly every pair of them, sampled at
# temperature 1, so that a lookup always matches and what follows is a guess among so many
ALPHABET, ALPHABET_TEXT = 24, 2048
RANDOM_TEXT = 256
EDIT_TOKENS = 160  # the edit's whole answer


def misses(vocab: int, seed: int) -> list[int]:
    """Ids of a text whose lookups find something and miss."""
    generator = random.Random(seed)
    alphabet = generator.sample(range(vocab), ALPHABET)
    return generator.choices(alphabet, k=ALPHABET_TEXT)


def random_text(vocab: int, seed: int) -> list[int]:
    """Ids that follow from nothing."""
    return random.Random(seed).choices(range(vocab), k=RANDOM_TEXT)


def groups(
    loaded: LoadedModel, path: Path, per_group: int, tokens: int
) -> dict[str, tuple[list[list[int]], SamplingParams]]:
    """Prompts and what is asked of them, by group: Spec-Bench's, evenly spaced, and the two of ours."""
    greedy = SamplingParams(tokens, ignore_eos=True)
    found = {}
    for group, chosen in questions.chosen(path, per_group).items():
        found[group] = [questions.encoded(loaded, question) for question in chosen], greedy
    sampled = SamplingParams(tokens, temperature=1.0, seed=SEED, ignore_eos=True)
    found["random ids"] = [random_text(loaded.num_tokens, seed) for seed in range(per_group)], greedy
    found["lookups that miss"] = [misses(loaded.num_tokens, seed) for seed in range(per_group)], sampled
    return found


def over_transformers(loaded: LoadedModel, plain: Engine, ids: list[int], args: argparse.Namespace) -> dict[str, Any]:
    """Plain decoding against transformers' own, in turns."""
    decode = generates(load_transformers(args.model, loaded.decoder.dtype, loaded.decoder.device))
    params = SamplingParams(args.tokens, ignore_eos=True)
    runs: dict[str, list[float]] = {"transformers": [], "plain": []}
    for _ in range(args.repeats):
        runs["transformers"].append(decode_seconds(decode, ids, args.tokens))
        runs["plain"].append(plain.generate(ids, params).stats.decode_seconds)
    ratio = median(runs["transformers"]) / median(runs["plain"])
    seconds = {name: [round(value, 4) for value in values] for name, values in runs.items()}
    print("plain over transformers", round(ratio, 3), flush=True)
    return {"seconds": seconds, "over transformers": round(ratio, 3)}


def measure(loaded: LoadedModel, plain: Engine, drafter: str, args: argparse.Namespace) -> dict[str, Any]:
    """One drafter on the edit prompt and on every group, over plain decoding."""
    draft_model = args.draft_model if drafter.startswith("draft-model") else None
    fast = make_engine(loaded, drafter=drafter, draft_model=draft_model, budget=args.budget, trees=args.trees)
    edit = questions.encoded(loaded, questions.edit_messages())
    fast.warm_up(edit)
    found: dict[str, Any] = {"edit": compare(plain, fast, [edit], SamplingParams(EDIT_TOKENS), args.repeats).to_dict()}
    print(drafter, "edit", found["edit"], flush=True)
    found["groups"] = {}
    for group, (prompts, params) in groups(loaded, args.questions, args.per_group, args.tokens).items():
        found["groups"][group] = compare(plain, fast, prompts, params, args.turns).to_dict()
        print(drafter, group, found["groups"][group], flush=True)
    found["least over plain"] = min(group["over plain"] for group in found["groups"].values())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5, help="of the edit prompt and of transformers")
    parser.add_argument("--turns", type=int, default=1, help="of each prompt of a group; the median counts")
    parser.add_argument("--per-group", type=int, default=5)
    parser.add_argument("--drafters", nargs="+", default=["ngram"])
    parser.add_argument("--draft-model", default="self:drop=7,13", help="of drafters that need one")
    parser.add_argument("--trees", default="chain")
    parser.add_argument("--budget", type=int, default=16)
    parser.add_argument("--out", default="cpu")
    args = parser.parse_args()

    loaded = load_model(args.model, dtype=args.dtype, device=args.device, max_length=4096, accept_terms=True)
    plain = make_engine(loaded, drafter="none")
    edit = questions.encoded(loaded, questions.edit_messages())
    plain.warm_up(edit)
    name = Path(args.model).stem
    facts = {"model": name, "dtype": args.dtype, "tokens": args.tokens, "trees": args.trees}
    parts: Parts = {
        **{("drafters", one): lambda _, one=one: measure(loaded, plain, one, args) for one in args.drafters},
        ("plain",): lambda _: over_transformers(loaded, plain, edit, args),
    }
    measure_parts(f"generate-{name}-{args.device}-{args.dtype}", facts, parts, args.out)


if __name__ == "__main__":
    main()
