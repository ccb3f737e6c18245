"""Real text at the speed of a larger shape: SmolLM2's function inside the 8b shape, a self-draft's inside the 1b shape.

    python bench/widened.py --questions spec_bench.jsonl --out h100

Widening (pad_engine/models/widen.py) keeps a model's logits and gives its steps the cost of the shape. What drafts and
what verifies are real, only their sizes are not those of trained models: which of them is widened stands in the result.
Acceptance in bf16 is measured on the wide models, and on the narrow ones beside them.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench_generate import groups
from compare import compare
from peers import our_engine
from resume import Parts, measure_parts
from shapes import SHAPES, shape_config

from pad_engine import SamplingParams
from pad_engine.loader import self_layers
from pad_engine.models.config import ModelConfig
from pad_engine.models.decoder import Decoder
from pad_engine.models.loader import LoadedModel, load_model
from pad_engine.models.widen import widen

# 22 of SmolLM2's 30 layers agree with all of them on about half of its tokens; the 16 of the 1b shape, on few
DRAFT = "self:drop=3,4,7,13,14,17,25,26"
MAX_LENGTH = 4096
Prompts = dict[str, tuple[list[list[int]], SamplingParams]]


def wide_pair(
    loaded: LoadedModel, draft: Decoder, target_shape: ModelConfig, draft_shape: ModelConfig
) -> tuple[LoadedModel, Decoder]:
    """A model in one shape and its draft model in another, which get more layers if they have too few."""
    target = widen(loaded, roomy(target_shape, len(loaded.decoder.layers)))
    return target, widen(draft, roomy(draft_shape, len(draft.layers)))


def roomy(shape: ModelConfig, layers: int) -> ModelConfig:
    """The shape with so many layers at least."""
    return replace(shape, num_layers=max(shape.num_layers, layers))


def measure(
    drafter: str, target: LoadedModel, draft: Decoder, prompts: Prompts, depth: int, turns: int
) -> dict[str, Any]:
    """A drafter over plain decoding on each group."""
    plain, fast = our_engine("none", target, draft), our_engine(drafter, target, draft, depth)
    first = next(iter(prompts.values()))[0][0]
    for engine in (plain, fast):
        engine.warm_up(first)
    found: dict[str, Any] = {}
    for group, (ids, params) in prompts.items():
        found[group] = compare(plain, fast, ids, params, turns).to_dict()
        print(drafter, group, found[group], flush=True)
    return found


def same_answers(loaded: LoadedModel, wide: LoadedModel, draft: Decoder, prompts: Prompts) -> str:
    """On how many prompts the wide model answers as the narrow one does, id for id; in half precision not on all."""
    engines = [our_engine("none", model, draft) for model in (loaded, wide)]
    pairs = [
        [engine.generate(one, params).token_ids for engine in engines]
        for ids, params in prompts.values()
        for one in ids
    ]
    return f"{sum(narrow == broad for narrow, broad in pairs)} of {len(pairs)}"


def facts(name: str, decoder: Decoder, layers: int) -> str:
    """What a widened model is."""
    return f"{layers} layers of the model, in the {name} shape with {len(decoder.layers)} layers"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft-model", default=DRAFT, help="layers of the model that draft")
    parser.add_argument("--target-shape", default="8b", choices=list(SHAPES))
    parser.add_argument("--draft-shape", default="1b", choices=list(SHAPES))
    parser.add_argument("--drafters", nargs="+", default=["ngram", "draft-model"])
    parser.add_argument("--depth", type=int, default=4, help="tokens that the draft model drafts in a row")
    parser.add_argument("--per-group", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--out", required=True, help="folder of results/ for this card, h100 for instance")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU")
    loaded = load_model(args.model, device="cuda", dtype="bfloat16", max_length=MAX_LENGTH, accept_terms=True)
    narrow = loaded.decoder.with_layers(self_layers(args.draft_model, len(loaded.decoder.layers)))
    prompts = groups(loaded, args.questions, args.per_group, args.tokens)
    shapes = [shape_config(name, MAX_LENGTH) for name in (args.target_shape, args.draft_shape)]
    with torch.inference_mode():
        target, draft = wide_pair(loaded, narrow, *shapes)
    name = Path(args.model).stem
    known = {
        "model": name,
        "target": facts(args.target_shape, target.decoder, len(loaded.decoder.layers)),
        "draft model": f"{args.draft_model}: {facts(args.draft_shape, draft, len(narrow.layers))}",
        "tokens": args.tokens,
    }
    pairs = {"wide": (target, draft), "narrow": (loaded, narrow)}
    parts: Parts = {
        (size, one): lambda _, one=one, pair=pair: measure(one, *pair, prompts, args.depth, args.turns)
        for size, pair in pairs.items()
        for one in args.drafters
    } | {("answers equal to the narrow model's",): lambda _: same_answers(loaded, target, draft, prompts)}
    measure_parts(f"widened-{name}-{args.target_shape}-{args.draft_shape}", known, parts, args.out)


if __name__ == "__main__":
    main()
