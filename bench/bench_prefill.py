"""Reading a prompt on a GPU: 2,048 tokens at the 8b shape against transformers, and the time to the first token.

    python bench/bench_prefill.py --out h100

Both have the same random bf16 weights and take turns, and their last logits must agree before anything is timed.
transformers runs with `attn_implementation="sdpa"` and fills a cache of its own, as ours does.
"""

import argparse
import gc
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import harness
import torch
from rig import Rig, random_ids
from shapes import LLAMA, SHAPES
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pad_engine.kv_cache import PREFILL_SCRATCH, KVCache, prefill_chunk
from pad_engine.models.config import parse_config
from pad_engine.models.decoder import Decoder, expected_tensors
from pad_engine.verify import prefill

CUDA = torch.device("cuda")
AGREEMENT = 0.1  # relative distance of two passes that round to bf16 in different places; other weights are 1.4 apart


def random_llama(shape: str, max_length: int, device: torch.device) -> LlamaForCausalLM:
    """transformers' model of a shape, with random weights that are made on the device."""
    sizes = {key: value for key, value in (LLAMA | SHAPES[shape]).items() if key not in ("model_type", "rope_theta")}
    rope = {"rope_type": "default", "rope_theta": LLAMA["rope_theta"]}
    config = LlamaConfig(**sizes, rope_parameters=rope, max_position_embeddings=max_length, attn_implementation="sdpa")
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device=device).eval()
    model.tie_weights()
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, 0.02, generator=generator)
        else:
            parameter.fill_(1.0)
    # its buffers were never filled
    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(device)
    return model


def same_decoder(model: LlamaForCausalLM, shape: str, max_length: int) -> Decoder:
    """Our decoder with the weights of transformers' model."""
    config = parse_config(LLAMA | SHAPES[shape] | {"max_position_embeddings": max_length})
    weights = model.state_dict()
    missing = set(expected_tensors(config)) - set(weights)
    if missing:
        raise ValueError(f"transformers' model has no {', '.join(sorted(missing))}")
    return Decoder(config, weights.__getitem__, max_length)


def last_logits(decoder: Decoder, cache: KVCache, ids: list[int]) -> Tensor:
    """fp32 `[1, V]` of the last of a prompt's tokens."""
    cache.reset(0, len(ids))
    return decoder.logits(prefill(decoder, cache, 0, ids, prefill_chunk(decoder.device)))


def turns(calls: Mapping[str, Callable[[], object]], repeats: int, warm: int = 2) -> dict[str, list[float]]:
    """Milliseconds of each call, by the host's clock, the calls taking turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(warm + repeats):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            torch.cuda.synchronize()
            if turn >= warm:
                times[name].append(1000 * (time.perf_counter() - start))
    return times


def against_transformers(shape: str, tokens: int, repeats: int) -> dict[str, Any]:
    """Prefill of `tokens` tokens by both, and how far their logits are apart."""
    model = random_llama(shape, 2 * tokens, CUDA)
    decoder = same_decoder(model, shape, 2 * tokens)
    cache = decoder.new_cache(capacity=2 * tokens, scratch=PREFILL_SCRATCH)
    ids = random_ids(tokens, decoder.config.vocab_size)
    row = torch.tensor([ids], device=CUDA)
    ours, theirs = last_logits(decoder, cache, ids), model(row, use_cache=True, logits_to_keep=1).logits[0].float()
    distance = ((ours - theirs).norm() / theirs.norm()).item()
    if not distance < AGREEMENT:
        raise RuntimeError(f"the two models' logits are {distance:.3g} apart, more than {AGREEMENT}")
    calls: dict[str, Callable[[], object]] = {
        "ours": lambda: last_logits(decoder, cache, ids),
        "transformers": lambda: model(row, use_cache=True, logits_to_keep=1),
    }
    times = turns(calls, repeats)
    middle = {name: median(values) for name, values in times.items()}
    return {
        "shape": shape,
        "tokens": tokens,
        "logits_apart": round(distance, 5),
        "ms": {name: [round(value, 3) for value in values] for name, values in times.items()},
        "over_transformers": round(middle["transformers"] / middle["ours"], 4),
    }


def first_tokens(shape: str, lengths: list[int], repeats: int, requests: int) -> dict[str, Any]:
    """Milliseconds to the first token of prompts, and the memory of a longest one and of many requests after it."""
    rig = Rig(shape, length=2 * max(lengths), device=CUDA)
    found: dict[str, Any] = {"shape": shape, "ttft_ms": {}}
    for length in lengths:
        ids = random_ids(length, rig.vocab)
        times = [1000 * rig.first_token(ids) for _ in range(repeats + 2)][2:]
        found["ttft_ms"][str(length)] = {
            "median": round(median(times), 3), "least": round(min(times), 3), "most": round(max(times), 3)
        }  # fmt: skip
        print(shape, length, found["ttft_ms"][str(length)], flush=True)
    # every length once: a library loads a kernel of its own for many of them
    for request in range(requests):
        rig.first_token(random_ids(16 + request, rig.vocab))
    known = rig.weight_bytes + rig.cache.nbytes
    before = torch.cuda.memory_reserved()
    for request in range(requests):
        rig.first_token(random_ids(16 + request, rig.vocab))
    growth = torch.cuda.memory_reserved() - before
    found["memory_mb"] = {
        "reserved_beyond": round((before - known) / 1e6, 1), "requests": requests, "growth": round(growth / 1e6, 1)
    }  # fmt: skip
    print(shape, found["memory_mb"], flush=True)
    return found


def release() -> None:
    """Give back what the last measurement held."""
    gc.collect()
    torch.cuda.empty_cache()


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shape", default="8b", choices=list(SHAPES), help="of the comparison with transformers")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ttft-shapes", nargs="*", default=["135m", "8b"], choices=list(SHAPES))
    parser.add_argument("--lengths", nargs="+", type=int, default=[16, 128, 2048], help="prompts of the first tokens")
    parser.add_argument("--requests", type=int, default=500, help="after which memory must not have grown")
    parser.add_argument("--out", required=True, help="folder of results/ for this card, h100 for instance")
    args = parser.parse_args()
    first = []
    for shape in args.ttft_shapes:
        release()
        first.append(first_tokens(shape, args.lengths, args.repeats, args.requests))
    release()
    prefilled = against_transformers(args.shape, args.tokens, args.repeats)
    print(prefilled, flush=True)
    print(harness.save("prefill", {"prefill": prefilled, "first_token": first}, args.out))


if __name__ == "__main__":
    main()
