"""How far are fp32 logits from transformers', in a prompt's pass, in cached steps, and in the rows of a tree?

python bench/logits.py --questions spec_bench.jsonl --model smollm2-135m
"""

import argparse
from pathlib import Path
from typing import Any

import harness
import questions
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from pad_engine.kv_cache import KVCache, RowGroup
from pad_engine.models.decoder import Decoder
from pad_engine.models.loader import load_model
from pad_engine.models.sources import resolve
from pad_engine.tree import DraftTree

# two branches behind the root, one of them with two leaves
PARENTS = [-1, 0, 0, 1, 1, 2]


def rows(decoder: Decoder, cache: KVCache, group: RowGroup) -> Tensor:
    """Logits of a group's rows, which stay in the scratch."""
    hidden, _ = decoder.forward(cache.place([group]), cache)
    return decoder.logits(hidden)


def differences(decoder: Decoder, oracle: Any, exact: Any, ids: list[int], steps: int) -> dict[str, float]:
    """The largest differences, and the largest logit. The last `steps` ids are read one by one. exact: the oracle in
    float64, from which both sides' prompts are measured too."""
    cache = decoder.new_cache(capacity=len(ids) + 1, scratch=512)
    expected = oracle(torch.tensor([ids])).logits[0]
    prompt = ids[:-steps]
    first = rows(decoder, cache, RowGroup(0, prompt, range(len(prompt))))
    cache.commit(0, range(len(prompt)))
    found = {"logit": expected.abs().max(), "prompt": (first - expected[: len(prompt)]).abs().max()}
    true = exact(torch.tensor([prompt])).logits[0]
    found |= {
        "prompt, share above 1e-4": ((first - expected[: len(prompt)]).abs() > 1e-4).double().mean(),
        "prompt from float64": (first - true).abs().max(),
        "transformers' prompt from float64": (expected[: len(prompt)] - true).abs().max(),
    }
    step = torch.zeros(())
    for place in range(len(prompt), len(ids) - 1):
        step = torch.maximum(step, (rows(decoder, cache, RowGroup(0, [ids[place]], [0])) - expected[place]).abs().max())
        cache.commit(0, [0])
    tree = DraftTree([ids[-1], *ids[1 : len(PARENTS)]], PARENTS)
    branches = rows(decoder, cache, RowGroup(0, tree.tokens, tree.depth, tree.mask()))
    paths = [oracle(torch.tensor([ids + path])).logits[0, -1] for path in tree.paths]
    found |= {"steps": step, "tree": (branches - torch.stack(paths)).abs().max()}
    return {key: float(value) for key, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--out", default="cpu")
    args = parser.parse_args()
    folder = resolve(args.model, accept_terms=True)
    loaded = load_model(folder, dtype="float32", device="cpu", max_length=2048)
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    runs = []
    with torch.inference_mode():
        for question in questions.spread(args.questions, args.prompts):
            ids = questions.encoded(loaded, question)[:400]
            runs.append({"tokens": len(ids), **differences(loaded.decoder, oracle, exact, ids, steps=8)})
            print(runs[-1], flush=True)
    print(harness.save(f"logits-{Path(args.model).stem}", {"model": args.model, "runs": runs}, args.out))


if __name__ == "__main__":
    main()
