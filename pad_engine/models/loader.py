"""A model ready to decode: found, checked, and loaded weight by weight. Next to read: sources.py, weights.py."""

import json
import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pad_engine.config import is_whole
from pad_engine.errors import ModelError, RequestError
from pad_engine.kv_cache import PREFILL_SCRATCH, prefill_chunk
from pad_engine.models.config import ModelConfig
from pad_engine.models.decoder import Decoder, expected_tensors
from pad_engine.models.lora import open_adapters
from pad_engine.models.memory import Estimate, check, estimate
from pad_engine.models.quantise import AS_STORED, pick_weights
from pad_engine.models.sources import resolve
from pad_engine.models.weights import Checkpoint

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
    weights: str = AS_STORED,
    max_length: int | None = None,
    adapters: str | Path | Sequence[str | Path] = (),
    accept_terms: bool = False,
    verbose: bool = False,
) -> LoadedModel:
    """Find, check and load a model.

    device: "auto", "cpu", "cuda". dtype: "auto" is float32 on a CPU and bfloat16 on a GPU. weights: "auto" keeps them
    in that type; "int8" and "fp8" quantise the matrices at load (quantise.py), which halves what a step reads on a GPU
    and changes the logits. max_length: tokens of prompt and answer together. adapters: LoRA folders, merged at load.
    accept_terms: the licence terms of models that have some are accepted. verbose: the memory estimate is printed to
    standard error.
    """
    device = pick_device(device)
    quantised = pick_weights(weights, device)
    folder = resolve(model, accept_terms=accept_terms)
    config = ModelConfig.from_folder(folder)
    length = pick_length(max_length, config)
    tokenizer = load_tokenizer(folder)
    vocabulary = tokenizer.get_vocab()
    dtype = pick_dtype(dtype, device)
    decoder = load_decoder(
        folder, config, length, device, dtype, quantised=quantised, adapters=adapters, verbose=verbose
    )
    own_eos = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    eos = tuple(dict.fromkeys(config.eos_token_ids + own_eos))
    if beyond := [token for token in eos if token >= config.vocab_size]:
        warnings.warn(
            f"eos_token_id {beyond[0]} is beyond the {config.vocab_size} tokens: it ends nothing", stacklevel=2
        )
    return LoadedModel(
        decoder,
        tokenizer,
        vocabulary,
        num_tokens=min(config.vocab_size, max(vocabulary.values()) + 1),
        eos_token_ids=eos,
    )


def load_decoder(
    folder: Path,
    config: ModelConfig,
    max_length: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    quantised: torch.dtype | None = None,
    adapters: str | Path | Sequence[str | Path] = (),
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
    need = memory_need(config, max_length, device, dtype, quantised)
    if verbose:
        print(need, file=sys.stderr)
    check(need, device)

    def get(name: str) -> torch.Tensor:
        weight = checkpoint.tensor(name, dtype, device)
        for adapter in merged:
            weight = adapter.apply(name, weight)
        return weight

    try:
        return Decoder(config, get, max_length, quantised)
    except torch.OutOfMemoryError as error:
        raise ModelError(f"the GPU's memory ran out while the weights were loaded ({need})", "free it first") from error


def memory_need(
    config: ModelConfig,
    max_length: int,
    device: torch.device,
    dtype: torch.dtype,
    quantised: torch.dtype | None = None,
) -> Estimate:
    """What a model of this config takes for one sequence of max_length tokens. quantised: as in Decoder."""
    largest = max(config.vocab_size, 2 * config.intermediate_size) * config.hidden_size
    return estimate(
        weights=weight_bytes(config, device, dtype, quantised),
        # one in the model's type, while it is quantised at load or a library multiplies with it
        matrix=0 if quantised is None else largest * dtype.itemsize,
        kv_rows=[max_length if window is None else min(window, max_length) for window in config.windows],
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        max_rows=prefill_chunk(device),
        scratch_rows=PREFILL_SCRATCH,
        logit_rows=64,
        kv_bytes=dtype.itemsize,
    )


def weight_bytes(config: ModelConfig, device: torch.device, dtype: torch.dtype, quantised: torch.dtype | None) -> int:
    """Bytes of all weights as they are kept."""
    shapes = expected_tensors(config)
    if config.tie_word_embeddings and (device.type == "cpu" or quantised is not None):
        # the copy for the product: packed (kernels/linear.py), or quantised
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    total = 0
    for name, shape in shapes.items():
        if quantised is not None and name.endswith(("_proj.weight", "lm_head.weight")):
            total += math.prod(shape) * quantised.itemsize + shape[0] * torch.float32.itemsize  # a scale each row
        else:
            total += math.prod(shape) * dtype.itemsize
    return total


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
    try:
        if names_plain_class(folder):
            # AutoTokenizer would come to this class too, after a second spent on importing every model's config
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(str(folder))
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # tokenizers raises no narrower type
        raise ModelError(
            f"the tokenizer in {folder} cannot be loaded: {error}", "it may need newer tokenizers or transformers"
        ) from error


def names_plain_class(folder: Path) -> bool:
    """Whether tokenizer_config.json names the class that does what tokenizer.json says and no more."""
    path = folder / "tokenizer_config.json"
    if not (path.is_file() and (folder / "tokenizer.json").is_file()):
        return False
    config = json.loads(path.read_text(encoding="utf-8"))
    return isinstance(config, dict) and config.get("tokenizer_class") == "PreTrainedTokenizerFast"


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
    if not is_whole(max_length) or not 2 <= max_length <= config.max_position_embeddings:
        raise RequestError(
            f"max_length must be in [2, {config.max_position_embeddings}], the model's own context, got {max_length!r}"
        )
    return max_length
