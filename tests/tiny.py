"""Random tiny models on disk, the engine around them, and transformers as the oracle. Nothing is fetched.

The token id of a byte is the byte itself, so texts and ids are easy to tell apart from each other.
"""

import json
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pad_engine.engine import Engine
from pad_engine.kv_cache import KVCache, RowGroup
from pad_engine.loader import load_engine
from pad_engine.models.config import ModelConfig
from pad_engine.models.decoder import Decoder
from pad_engine.models.loader import load_decoder
from pad_engine.rules.classifier import PIVOT_MLP, SCALARS, Classifier, expected_shapes

VOCAB, EOS, BOS = 300, 256, 257
CPU = torch.device("cpu")
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": EOS,
    "bos_token_id": BOS,
    "pad_token_id": None,
}
# what each family needs to be tiny and yet itself
FAMILY: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"head_dim": 12, "sliding_window": 8},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    "qwen3": {"head_dim": 16},
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 8,
        "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
}


def make_tiny_model(
    folder: Path, family: str = "llama", seed: int = 0, *, tokens: int = VOCAB, noise: float = 0.0, **overrides: Any
) -> Path:
    """Write a random model of a family, and its tokenizer, as transformers saves them.

    tokens: entries of the tokenizer, which the config's vocab_size may exceed. noise: how far every weight is moved, in
    standard deviations, from the model of the same arguments without noise: a draft model that agrees now and then.
    overrides: keys of the config.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **BASE | FAMILY[family] | overrides))
    for parameters, generator in ((model.parameters(), seed), (model.parameters() if noise else (), seed + 1000)):
        random = torch.Generator().manual_seed(generator)
        for parameter in parameters:
            spread = 0.15 if parameter.dim() > 1 else 0.3
            fresh = torch.randn(parameter.shape, generator=random) * spread
            if generator != seed:
                parameter.data += noise * fresh
            else:
                # Gemma's norms are stored minus one
                parameter.data = fresh + (parameter.dim() == 1 and family != "gemma3_text")
    model.save_pretrained(folder)
    make_tokenizer(tokens).save_pretrained(folder)
    return folder


def make_tokenizer(tokens: int = VOCAB, swap: tuple[int, int] | None = None, add_bos: bool = False) -> Any:
    """Bytes, then `<eos>` and `<bos>`, then ordinary tokens `<x258>` and so on. swap: two ids that change places."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    names = [bytes_to_unicode()[byte] for byte in range(256)]
    names += ["<eos>", "<bos>", *(f"<x{i}>" for i in range(258, tokens))]
    if swap:
        names[swap[0]], names[swap[1]] = names[swap[1]], names[swap[0]]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>", chat_template=CHAT_TEMPLATE
    )


def edit_config(folder: Path, *removed: str, **changed: Any) -> Path:
    """Change config.json as it lies on disk, in ways that transformers would not write."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changed
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in removed}))
    return folder


def tiny_decoder(folder: Path, dtype: torch.dtype = torch.float32, max_length: int = 128) -> Decoder:
    return load_decoder(folder, ModelConfig.from_folder(folder), max_length, CPU, dtype)


def tiny_engine(folder: Path, drafter: Any = "none", **options: Any) -> Engine:
    """load_engine on the CPU, drafting the whole budget in each round; `controller=True` lets the controller decide."""
    options.setdefault("fixed_budget", not options.pop("controller", False))
    return load_engine(folder, drafter=drafter, device="cpu", **options)


def read(decoder: Decoder, cache: KVCache, tokens: Sequence[int], chunk: int = 512, seq: int = 0) -> Tensor:
    """Commit tokens to the cache, `chunk` rows a pass; returns their logits `[len(tokens), V]`."""
    parts = [torch.empty(0, decoder.config.vocab_size)]
    with torch.inference_mode():
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            hidden, _ = decoder.forward(cache.place([RowGroup(seq, part, range(len(part)))]), cache)
            parts.append(decoder.logits(hidden))
            cache.commit(seq, range(len(part)))
    return torch.cat(parts)


def sequential(decoder: Decoder, ids: Sequence[int], prompt_length: int = 0) -> Tensor:
    """Logits `[len(ids), V]` of plain one-token decoding with a fresh cache."""
    cache = decoder.new_cache(capacity=len(ids), scratch=1)
    cache.reset(0, prompt_length)
    return read(decoder, cache, ids, chunk=1)


def some_ids(count: int, seed: int = 0) -> list[int]:
    ids: list[int] = torch.randint(0, 250, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


class Oracle:
    """transformers on the same folder."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32, attention: str = "eager") -> None:
        self.folder, self.dtype, self.attention = folder, dtype, attention

    @cached_property
    def model(self) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=self.dtype, attn_implementation=self.attention
        ).eval()

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """`[len(ids), V]` of one pass without a cache."""
        out: Tensor = self.model(torch.tensor([list(ids)]), use_cache=False).logits[0].float()
        return out

    @torch.inference_mode()
    def cached_logits(self, prompt: Sequence[int], ids: Sequence[int]) -> Tensor:
        """The prompt in one pass, then the other ids one by one: `[len(prompt) + len(ids), V]`."""
        out = self.model(torch.tensor([list(prompt)]), use_cache=True)
        parts = [out.logits[0]]
        for token in ids:
            out = self.model(torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
            parts.append(out.logits[0])
        return torch.cat(parts).float()

    @torch.inference_mode()
    def greedy(self, ids: Sequence[int], count: int, eos: Sequence[int] = ()) -> list[int]:
        """What `generate` adds, the end-of-sequence id included."""
        prompt = torch.tensor([list(ids)])
        out = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=list(eos) or None,
            pad_token_id=0,
        )
        new: list[int] = out[0, len(ids) :].tolist()
        return new


class ModelStore:
    """Tiny models by their arguments, each written once a session."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folders: dict[str, Path] = {}

    def __call__(self, family: str = "llama", seed: int = 0, **options: Any) -> Path:
        key = repr((family, seed, sorted(options.items())))
        if key not in self.folders:
            self.folders[key] = make_tiny_model(self.root / str(len(self.folders)), family, seed, **options)
        return self.folders[key]


Make = Callable[..., Path]


def random_classifier(
    folder: Path, kind: str, hidden_size: int, tap_layer: int, scalars: Sequence[str] = SCALARS
) -> Path:
    """Write a classifier of random weights, whose answers lie on both sides of one half."""
    scalars = tuple(scalars) if kind == PIVOT_MLP else ()
    generator = torch.Generator().manual_seed(3)
    shapes = expected_shapes(kind, hidden_size, len(scalars))
    weights = {name: 1.5 * torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    path = folder / f"{kind}.safetensors"
    Classifier(kind, tap_layer, hidden_size, scalars, weights, "tiny").save(path)
    return path
