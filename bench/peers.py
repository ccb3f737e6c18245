"""Decoding by one piece of software, in a process of its own: by ours, or by a peer on its own documented fast path.

    python bench/peers.py PEER JOB.json

JOB: see Job. Prints one JSON object last. bench_peers.py writes jobs and runs the peers. transformers is `generate` as
it is, with a static cache (which compiles the forward pass on a GPU), with prompt lookup, or assisted by the draft
model; flashspec (pip install flashspec, Apache-2.0) is its engine with the draft model.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from forced import successor_decoder, successor_weights
from rig import Letters
from shapes import LLAMA, random_weights, shape_config, shape_sizes

from pad_engine import Engine, SamplingParams
from pad_engine.loader import draft_engine, make_engine, self_layers
from pad_engine.models.decoder import Decoder, expected_tensors
from pad_engine.models.loader import LoadedModel, load_model
from pad_engine.models.sources import resolve
from pad_engine.training.finetune import take_layers

Decode = Callable[[list[int], int], list[int]]
DEPTH = 4  # tokens that a draft model drafts in a row


@dataclass(frozen=True)
class Job:
    """model: a name as of load_model, with its draft model `self:...`; or `shape:1b` with `shape:1b:4`, random weights
    of which the draft model's err behind the ids `wrong` (forced.py). prompts: ids. groups: of each prompt, where they
    have any. tokens: new ones a prompt."""

    model: str
    draft: str
    prompts: list[list[int]]
    tokens: int
    max_length: int
    device: str = "cuda"
    dtype: str = "bfloat16"
    wrong: tuple[int, ...] = ()
    groups: tuple[str, ...] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of the weights."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found


def shape_of(name: str) -> tuple[str, int | None] | None:
    """The shape and layers of `shape:1b:4`; None for a real model."""
    kind, _, rest = name.partition(":")
    shape, _, layers = rest.partition(":")
    return (shape, int(layers) if layers else None) if kind == "shape" else None


# ours


def our_models(job: Job) -> tuple[LoadedModel, Decoder]:
    """Target and draft model."""
    shape, device = shape_of(job.model), torch.device(job.device)
    if shape is None:
        loaded = load_model(job.model, device=device, dtype=job.dtype, max_length=job.max_length, accept_terms=True)
        return loaded, loaded.decoder.with_layers(self_layers(job.draft, len(loaded.decoder.layers)))
    draft_shape = shape_of(job.draft)
    assert draft_shape is not None, "a shape is drafted for by a shape"
    target = successor_decoder(shape[0], device, job.torch_dtype, job.max_length, shape[1])
    draft = successor_decoder(draft_shape[0], device, job.torch_dtype, job.max_length, draft_shape[1], job.wrong)
    return LoadedModel(target, Letters(), {}, target.config.vocab_size, ()), draft


def ours(drafter: str) -> Callable[[Job], Decode]:
    """This engine with a drafter, its controller deciding."""

    def build(job: Job) -> Decode:
        engine = our_engine(drafter, *our_models(job))
        engine.warm_up(job.prompts[0])
        return answers(engine)

    return build


def our_engine(drafter: str, loaded: LoadedModel, draft: Decoder, depth: int = DEPTH, **options: Any) -> Engine:
    """An engine with a drafter by its name; "draft-model" is the model given, and not one on disk."""
    if drafter != "draft-model":
        return make_engine(loaded, drafter=drafter, **options)
    return draft_engine(loaded, draft, loaded.num_tokens, depth, **options)


def answers(engine: Engine) -> Decode:
    """The ids of greedy answers."""

    def decode(ids: list[int], count: int) -> list[int]:
        return engine.generate(ids, SamplingParams(count, ignore_eos=True)).token_ids

    return decode


# transformers


def load_transformers(model: str, dtype: torch.dtype, device: torch.device) -> Any:
    """transformers' model of the same files."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(resolve(model, accept_terms=True), dtype=dtype).to(device).eval()


def successor_llama(job: Job, name: str, wrong: tuple[int, ...]) -> Any:
    """transformers' model with the weights of forced.py."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    shape = shape_of(name)
    assert shape is not None, "a shape"
    device, sizes = torch.device(job.device), shape_sizes(*shape)
    rope = {"rope_type": "default", "rope_theta": LLAMA["rope_theta"]}
    sizes |= {"tie_word_embeddings": False, "max_position_embeddings": job.max_length, "bos_token_id": None}
    config = LlamaConfig(**sizes, rms_norm_eps=LLAMA["rms_norm_eps"], rope_parameters=rope, eos_token_id=None)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    own = replace(shape_config(shape[0], job.max_length, shape[1]), tie_word_embeddings=False)
    get = successor_weights(random_weights(own, device, job.torch_dtype), own, wrong)
    model.load_state_dict({tensor: get(tensor) for tensor in expected_tensors(own)}, assign=True)
    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(device)  # its buffers were never filled
    return model.eval()


def their_models(job: Job, drafts: bool) -> tuple[Any, Any]:
    """transformers' target and, if it is wanted, draft model."""
    if shape_of(job.model) is not None:
        target = successor_llama(job, job.model, ())
        return target, successor_llama(job, job.draft, job.wrong) if drafts else None
    device = torch.device(job.device)
    target = load_transformers(job.model, job.torch_dtype, device)
    if not drafts:
        return target, None
    draft = load_transformers(job.model, job.torch_dtype, device)
    take_layers(draft, self_layers(job.draft, target.config.num_hidden_layers))
    return target, draft


def theirs(assisted: bool = False, **options: Any) -> Callable[[Job], Decode]:
    """transformers' `generate` with options of its own."""

    def build(job: Job) -> Decode:
        target, draft = their_models(job, assisted)
        if draft is None:
            return generates(target, **options)
        draft.generation_config.eos_token_id = None
        draft.generation_config.num_assistant_tokens = DEPTH
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        return generates(target, assistant_model=draft, **options)

    return build


def generates(model: Any, **options: Any) -> Decode:
    """Greedy `model.generate` of exactly so many new ids."""
    model.generation_config.eos_token_id = None  # only the length ends an answer

    def decode(ids: list[int], count: int) -> list[int]:
        prompt = torch.tensor([ids], device=model.device)
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False, pad_token_id=0,
            **options,
        )  # fmt: skip
        new: list[int] = out[0, len(ids) :].tolist()
        return new

    return decode


# flashspec


def flashspec(job: Job) -> Decode:
    """Its engine with the draft model, DEPTH tokens a step; compiled where it can."""
    from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
    from flashspec.engine import HuggingFaceDrafter, TargetModel

    target, draft = their_models(job, drafts=True)
    device, dtype = torch.device(job.device), job.torch_dtype
    config = FlashSpecConfig(
        device=str(device), drafter_strategy="bandit", bandit=BanditConfig(n_arms=1),
        sampling=SamplingConfig(temperature=0.0, gamma=DEPTH), compile_max_cache_len=job.max_length,
    )  # fmt: skip
    drafter = HuggingFaceDrafter(job.draft, device, dtype, model=draft)
    engine = SpeculativeEngine(config, [drafter], TargetModel(job.model, device, dtype, model=target))

    def decode(ids: list[int], count: int) -> list[int]:
        result = engine.generate(torch.tensor([ids], device=device), max_new_tokens=count)
        new: list[int] = result.output_ids[0, : result.n_tokens_generated].tolist()
        return new

    return decode


PEERS: dict[str, Callable[[Job], Decode]] = {
    "pad plain": ours("none"),
    "pad ngram": ours("ngram"),
    "pad draft-model": ours("draft-model"),
    "transformers eager": theirs(),
    "transformers static, compiled": theirs(cache_implementation="static"),
    "transformers prompt lookup": theirs(prompt_lookup_num_tokens=10),
    "transformers assisted": theirs(assisted=True),
    "flashspec": flashspec,
}


def decode_seconds(decode: Decode, ids: list[int], tokens: int) -> float:
    """Seconds of decoding, the first token, which comes from the prompt's pass, left out and made up for."""

    def run(count: int) -> float:
        start = time.perf_counter()
        decode(ids, count)
        return time.perf_counter() - start

    return (run(tokens) - run(1)) * tokens / (tokens - 1)


def tokens_per_second(tokens: int, seconds: Sequence[float]) -> float:
    """Of answers of so many tokens each that took so long."""
    return tokens * len(seconds) / sum(seconds)


def run(peer: str, job: Job) -> dict[str, Any]:
    """Every prompt decoded by a peer, behind one that is not timed but for being the first."""
    decode = PEERS[peer](job)
    longest = max(job.prompts, key=len)
    start = time.perf_counter()
    decode(longest, job.tokens)  # also makes a static cache as large as it will be
    first = time.perf_counter() - start
    for ids in job.prompts:
        decode(ids, 1)  # what a prompt of a new length takes only once is not decoding
    found: list[list[int]] = []

    def kept(ids: list[int], count: int) -> list[int]:
        answer = decode(ids, count)
        if count == job.tokens:
            found.append(answer)
        return answer

    seconds = [decode_seconds(kept, ids, job.tokens) for ids in job.prompts]
    rate = tokens_per_second(job.tokens, seconds)
    by_group = {group: [one for one, of in zip(seconds, job.groups, strict=True) if of == group]
                for group in dict.fromkeys(job.groups)}  # fmt: skip
    return {
        "tokens_per_second": round(rate, 2),
        "groups": {group: round(tokens_per_second(job.tokens, its), 2) for group, its in by_group.items()},
        "ms_per_token": round(1000 / rate, 5),
        "first_call_seconds": round(first, 2),
        "seconds": [round(value, 5) for value in seconds],
        "answers": found,
    }


def main() -> None:
    peer, path = sys.argv[1:]
    job = Job(**json.loads(Path(path).read_text(encoding="utf-8")))
    print(json.dumps(run(peer, job)))


if __name__ == "__main__":
    main()
