"""From names to a running engine: find the model, check it, load it, and put drafter, rule and controller around it."""

import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pad_engine.config import parse_spec, refuse_rest, take_int
from pad_engine.controller import Controller
from pad_engine.drafters.draft_model import DraftModel
from pad_engine.drafters.drafter import Drafter
from pad_engine.drafters.ngram import NGram
from pad_engine.drafters.none import NoDrafter
from pad_engine.engine import PREFILL_CHUNK, Engine
from pad_engine.errors import ModelError, RequestError
from pad_engine.models.config import ModelConfig
from pad_engine.models.decoder import Decoder, expected_tensors
from pad_engine.models.lora import open_adapters
from pad_engine.models.memory import Estimate, check, estimate
from pad_engine.models.sources import resolve
from pad_engine.models.weights import Checkpoint
from pad_engine.rules.rule import AcceptanceRule
from pad_engine.trees.builder import make_builder

# A context as long as the model allows, but no longer than this unless max_length asks for it: the cache is allocated
# when the engine is made.
DEFAULT_MAX_LENGTH = 8192
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A target ready to decode. vocabulary: token to id. num_tokens: ids from here on are padding of the vocabulary.
    eos_token_ids: the union of what config, generation config and tokenizer name."""

    decoder: Decoder
    tokenizer: Any
    vocabulary: dict[str, int]
    num_tokens: int
    eos_token_ids: tuple[int, ...]


def load_model(
    model: str | Path,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    max_length: int | None = None,
    adapters: Sequence[str | Path] = (),
    accept_terms: bool = False,
    verbose: bool = False,
) -> LoadedModel:
    """Find, check and load a model.

    device: "auto", "cpu", "cuda". dtype: "auto" is float32 on a CPU and bfloat16 on a GPU. max_length: tokens of prompt
    and answer together. adapters: LoRA folders, merged at load. accept_terms: the licence terms of models that have
    some are accepted. verbose: the memory estimate is printed to standard error.
    """
    device = pick_device(device)
    folder = resolve(model, accept_terms=accept_terms)
    config = ModelConfig.from_folder(folder)
    length = pick_length(max_length, config)
    tokenizer = load_tokenizer(folder)
    vocabulary = tokenizer.get_vocab()
    decoder = load_decoder(
        folder, config, length, device, pick_dtype(dtype, device), adapters=adapters, verbose=verbose
    )
    own_eos = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return LoadedModel(
        decoder,
        tokenizer,
        vocabulary,
        num_tokens=min(config.vocab_size, max(vocabulary.values()) + 1),
        eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + own_eos)),
    )


def make_engine(
    loaded: LoadedModel,
    *,
    drafter: str | Drafter | None = None,
    draft_model: str | Path | None = None,
    trees: str = "chain",
    rule: str | AcceptanceRule = "auto",
    budget: int = 16,
    fixed_budget: bool = False,
    accept_terms: bool = False,
) -> Engine:
    """Put a drafter, a rule and a controller around a loaded model. Several engines may share one.

    drafter: "none", "ngram[:min=2,depth=15]", "draft-model[:depth=8]" or an object; by default draft-model when a
    draft_model is given, else ngram. draft_model: a model like the target, or "self:drop=3,4" / "self:layers=0,1" for
    the target with layers left out. trees: "chain" or "best-first". budget: nodes of a tree at most, root included.
    fixed_budget: always draft the whole budget instead of what pays.
    """
    if not 1 <= budget <= 64:
        raise RequestError(f"budget must be in [1, 64], got {budget}")
    depth = budget - 1
    if isinstance(drafter, str) or drafter is None:
        spec = drafter or ("draft-model" if draft_model else "ngram")
        check_drafter(spec, trees, budget)
        draft = load_draft(draft_model, loaded, accept_terms) if spec.startswith("draft-model") else None
        drafter, depth = make_drafter(spec, trees, budget, loaded.num_tokens, draft)
    return Engine(
        loaded.decoder,
        loaded.tokenizer,
        drafter,
        Controller(budget, depth, fixed=fixed_budget),
        rule=rule,
        max_length=loaded.decoder.max_length,
        num_tokens=loaded.num_tokens,
        eos_token_ids=loaded.eos_token_ids,
    )


MODEL_OPTIONS = ("device", "dtype", "max_length", "adapters", "accept_terms", "verbose")


def load_engine(model: str | Path, **options: Any) -> Engine:
    """load_model and make_engine in one: takes the options of both."""
    ours = {key: options.pop(key) for key in MODEL_OPTIONS if key in options}
    return make_engine(load_model(model, **ours), **options)


def load_decoder(
    folder: Path,
    config: ModelConfig,
    max_length: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    adapters: Sequence[str | Path] = (),
    verbose: bool = False,
) -> Decoder:
    """Check a checkpoint against its config, show and check the memory it needs, and load it weight by weight."""
    checkpoint = Checkpoint.open(folder)
    expected = expected_tensors(config)
    if config.tie_word_embeddings and checkpoint.has("lm_head.weight"):
        config = untie_if_different(checkpoint, config)
        expected = expected_tensors(config)
    checkpoint.require(expected, optional=["lm_head.weight"])
    merged = open_adapters(adapters)
    for adapter in merged:
        adapter.check(expected)
    need = memory_need(config, max_length, device, dtype)
    if verbose:
        print(need, file=sys.stderr)
    check(need, device)

    def get(name: str) -> torch.Tensor:
        weight = checkpoint.tensor(name, dtype, device)
        for adapter in merged:
            weight = adapter.apply(name, weight)
        return weight

    try:
        return Decoder(config, get, max_length)
    except torch.OutOfMemoryError as error:
        raise ModelError(f"the GPU's memory ran out while the weights were loaded ({need})", "free it first") from error


def memory_need(config: ModelConfig, max_length: int, device: torch.device, dtype: torch.dtype) -> Estimate:
    """What a model of this config takes for one sequence of max_length tokens."""
    parameters = sum(math.prod(shape) for shape in expected_tensors(config).values())
    if config.tie_word_embeddings and device.type == "cpu":
        parameters += config.vocab_size * config.hidden_size  # the packed copy for the product (kernels/linear.py)
    return estimate(
        parameters=parameters,
        kv_rows=[max_length if window is None else min(window, max_length) for window in config.windows],
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        max_rows=PREFILL_CHUNK,
        logit_rows=64,
        weight_bytes=dtype.itemsize,
        kv_bytes=dtype.itemsize,
    )


def untie_if_different(checkpoint: Checkpoint, config: ModelConfig) -> ModelConfig:
    """A checkpoint that says it ties its embeddings and yet holds an output matrix of its own: that matrix is used, as
    transformers does, and the contradiction is said."""
    cpu = torch.device("cpu")
    head = checkpoint.tensor("lm_head.weight", torch.float32, cpu)
    if torch.equal(head, checkpoint.tensor("model.embed_tokens.weight", torch.float32, cpu)):
        return config
    warnings.warn(
        "config.json ties lm_head to the embeddings, but the checkpoint holds a different lm_head.weight: it is used",
        stacklevel=3,
    )
    return replace(config, tie_word_embeddings=False)


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer, by transformers; no code of the folder is ever run."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"the tokenizer in {folder} cannot be loaded: {error}") from error


def load_draft(draft_model: str | Path | None, target: LoadedModel, accept_terms: bool) -> tuple[Decoder, int]:
    """The draft model, and the number of ids that mean the same to both models."""
    if draft_model is None:
        raise RequestError("drafter draft-model needs a draft_model", 'a model, or "self:drop=3,4"')
    decoder = target.decoder
    if str(draft_model).startswith("self:"):
        return decoder.with_layers(self_layers(str(draft_model), decoder.config.num_layers)), target.num_tokens
    folder = resolve(draft_model, accept_terms=accept_terms)
    config = ModelConfig.from_folder(folder)
    shared = shared_tokens(target.vocabulary, load_tokenizer(folder).get_vocab())
    length = min(decoder.max_length, config.max_position_embeddings)
    return load_decoder(folder, config, length, decoder.device, decoder.dtype), min(shared, config.vocab_size)


def self_layers(spec: str, num_layers: int) -> list[int]:
    """Layers kept by `self:layers=...` or left by `self:drop=...`."""
    _, values = parse_spec(spec, "draft_model")
    if set(values) not in ({"layers"}, {"drop"}):
        raise RequestError(f"draft_model {spec!r}: expected self:layers=0,1,... or self:drop=3,4,...")
    try:
        named = [int(part) for part in next(iter(values.values())).split(",")]
    except ValueError:
        raise RequestError(f"draft_model {spec!r}: layers must be whole numbers") from None
    if any(not 0 <= layer < num_layers for layer in named):
        raise RequestError(f"draft_model {spec!r}: layers must be in [0, {num_layers - 1}]")
    kept = named if "layers" in values else [layer for layer in range(num_layers) if layer not in named]
    if not kept:
        raise RequestError(f"draft_model {spec!r} keeps no layer")
    return kept


def shared_tokens(target: dict[str, int], draft: dict[str, int]) -> int:
    """How many ids, from 0 on, stand for the same token in both vocabularies; one may only be longer than the other."""
    mine, theirs = {i: t for t, i in target.items()}, {i: t for t, i in draft.items()}
    count = min(max(mine), max(theirs)) + 1
    for token_id in range(count):
        if mine.get(token_id) != theirs.get(token_id):
            raise ModelError(
                f"target and draft model have different tokenizers: id {token_id} is {mine.get(token_id)!r} "
                f"to the target and {theirs.get(token_id)!r} to the draft model",
                "a draft model must share the target's tokenizer",
            )
    return count


def make_drafter(
    spec: str, trees: str, budget: int, num_tokens: int, draft: tuple[Decoder, int] | None
) -> tuple[Drafter, int]:
    """A drafter by its name and options, and how deep it may draft."""
    name, options = check_drafter(spec, trees, budget)
    builder = make_builder(trees)
    if name == "none":
        return NoDrafter(), 0
    if name == "ngram":
        return NGram(builder, options["min"]), options["depth"]
    assert draft is not None, "draft-model is made with a draft model"
    decoder, shared = draft
    shared = min(num_tokens, shared)
    drafter = DraftModel(
        decoder, builder, num_tokens=shared, capacity=decoder.max_length, budget=budget, chunk=PREFILL_CHUNK
    )
    return drafter, options["depth"]


def check_drafter(spec: str, trees: str, budget: int) -> tuple[str, dict[str, int]]:
    """A drafter's name and options, checked without making it."""
    name, values = parse_spec(spec, "drafter")
    make_builder(trees)
    options: dict[str, int] = {}
    if name == "ngram":
        options["min"] = take_int(values, "min", 2, "drafter ngram", high=8)
        options["depth"] = take_int(values, "depth", max(budget - 1, 1), "drafter ngram")
    elif name == "draft-model":
        options["depth"] = take_int(values, "depth", 8, "drafter draft-model")
    elif name != "none":
        raise RequestError(f"drafter must be none, ngram or draft-model, got {name!r}")
    refuse_rest(values, f"drafter {name}", ", ".join(options) or "none")
    return name, options


def pick_device(device: str | torch.device) -> torch.device:
    """The device named, or the GPU if there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        picked = torch.device(device)
    except RuntimeError:
        raise RequestError(f"device must be auto, cpu or cuda, got {device!r}") from None
    if picked.type not in ("cpu", "cuda"):
        raise RequestError(f"device {picked.type!r} is not supported", "use cpu or cuda")
    if picked.type == "cuda" and not torch.cuda.is_available():
        raise RequestError("device cuda: torch sees no GPU", "use --device cpu, or install a CUDA build of torch")
    return picked


def pick_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The type named; by default exact on a CPU, and half the bytes on a GPU."""
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise RequestError(f"dtype must be auto or one of {', '.join(DTYPES)}, got {dtype!r}")
    return DTYPES[dtype]


def pick_length(max_length: int | None, config: ModelConfig) -> int:
    """Tokens of prompt and answer together."""
    if max_length is None:
        return min(config.max_position_embeddings, DEFAULT_MAX_LENGTH)
    if not 2 <= max_length <= config.max_position_embeddings:
        raise RequestError(
            f"max_length must be in [2, {config.max_position_embeddings}], the model's own context, got {max_length}"
        )
    return max_length
