"""A small model's function inside a larger shape, so that speed at that shape is measured with real acceptance.

The larger model computes what the small one does; its other weights only cost the reading and the arithmetic. Two
invariants make that exact, up to the order of sums in fp32:

- *Quiet* places. A place of an activation that has no original (a hidden dimension, a dimension of a head, an inner
  unit) is zero but for numbers around 2^-100. The weights that would fill it from places with an original are +-2^-100:
  normal numbers in bf16, which nothing can skip as it skips zeros, and which a sum in fp32 does not notice, unless it
  stands exactly between two numbers.
- *Free* weights. What multiplies quiet places is random, of ordinary size. That is most of a much larger shape.

The rest follows. A norm over D dimensions of which d are not quiet sees the mean square times d/D: its epsilon is
scaled by d/D and its weights by sqrt(d/D). The attention scale stays that of the original head_dim. Rotary pairs keep
their frequency (widen_places.py). A group of query heads that grows gets heads that attend to real values, so their
columns of the output projection are quiet. A layer without an original has only quiet outputs: an identity.

In bf16 the scaled norm weights and the sums round differently: measure acceptance again, never carry it over.
Next to read: widen_places.py.
"""

import math
from dataclasses import replace
from typing import overload

import torch
from torch import Tensor

from pad_engine.errors import ModelError
from pad_engine.kernels.linear import Linear
from pad_engine.models.config import ModelConfig
from pad_engine.models.decoder import Decoder, GetTensor
from pad_engine.models.loader import LoadedModel, memory_need
from pad_engine.models.memory import check
from pad_engine.models.widen_places import Places, kv_copies, make_places

TINY = 2.0**-100
SPREAD = 0.7  # of free weights, over the root of their columns: hidden states neither vanish nor overflow
# Ids past the real vocabulary are masked by one more hidden dimension, the last. Every token's embedding holds MARK
# there, too small for any norm to notice; the final norm lifts it to 1 / rms, and the LM head rows of those ids take
# MASK times that. So they lose at every temperature and in every kernel, though the whole LM head is read.
MARK, LIFT, MASK = 2.0**-40, 2.0**40, -(2.0**30)
GROWING = ("hidden_size", "intermediate_size", "head_dim", "num_kv_heads", "vocab_size")


@overload
def widen(model: Decoder, shape: ModelConfig, *, seed: int = 0) -> Decoder: ...
@overload
def widen(model: LoadedModel, shape: ModelConfig, *, seed: int = 0) -> LoadedModel: ...
def widen(model: Decoder | LoadedModel, shape: ModelConfig, *, seed: int = 0) -> Decoder | LoadedModel:
    """The same function in a larger shape, on the same device and in the same type, quantised if the model is.

    model: of a Llama-like family (llama, mistral, qwen2, qwen3), in fp32 or bf16; may be a self-draft of fewer layers
    (`Decoder.with_layers`). shape: only its sizes count, hidden_size, intermediate_size, num_layers, num_heads,
    num_kv_heads, head_dim and vocab_size, and tie_word_embeddings; the rest stays the model's. seed: of free weights.

    In the result hidden dimensions, inner units, layers and ids keep their numbers; logits are `[N, shape.vocab_size]`,
    whose new ids are never picked. A LoadedModel's num_tokens grows with vocab_size, so that the engine reads the whole
    LM head; rules whose threshold depends on num_tokens (fly) then see the larger one. Weights are made one by one.

    ModelError names the size that cannot be had.
    """
    decoder = model.decoder if isinstance(model, LoadedModel) else model
    num_tokens = model.num_tokens if isinstance(model, LoadedModel) else decoder.config.vocab_size
    check_sizes(decoder, shape)
    config = wide_config(decoder, shape)
    need = memory_need(config, decoder.max_length, decoder.device, decoder.dtype, decoder.quantised)
    check(need, decoder.device)
    places = make_places(decoder, config, num_tokens)
    wide = Decoder(config, Widened(decoder, config, places, seed).tensor, decoder.max_length, decoder.quantised)
    if not isinstance(model, LoadedModel):
        return wide
    return replace(model, decoder=wide, num_tokens=config.vocab_size if places.masks else num_tokens)


def check_sizes(decoder: Decoder, shape: ModelConfig) -> None:
    """ModelError unless the decoder's function fits into the shape; rotary frequencies are checked by rotary_pairs."""
    config, layers = decoder.config, len(decoder.layers)
    if config.gemma:
        raise ModelError(f"a {config.family} cannot be widened", "llama, mistral, qwen2 and qwen3 can")
    if decoder.dtype not in (torch.float32, torch.bfloat16):
        raise ModelError(f"widening needs float32 or bfloat16, which hold 2^-100, got {decoder.dtype}")
    for name, own in [("num_layers", layers), *((name, getattr(config, name)) for name in GROWING)]:
        if getattr(shape, name) < own:
            raise ModelError(f"{name} {getattr(shape, name)} is below the model's own {own}", "widening only adds")
    if shape.num_heads % shape.num_kv_heads:
        raise ModelError(f"num_heads {shape.num_heads} is not a multiple of num_kv_heads {shape.num_kv_heads}")
    needed = config.num_kv_heads * kv_copies(config, shape)
    if shape.num_kv_heads < needed:
        raise ModelError(
            f"num_heads {shape.num_heads} in {shape.num_kv_heads} groups (num_kv_heads) do not hold the model's "
            f"{config.num_heads} in {config.num_kv_heads}: groups of that size need num_kv_heads {needed}"
        )
    if shape.vocab_size > config.vocab_size and shape.hidden_size == config.hidden_size:
        raise ModelError(
            f"vocab_size {shape.vocab_size} above the model's own {config.vocab_size} needs a hidden_size above "
            f"{config.hidden_size}, got {shape.hidden_size}",
            "ids past the vocabulary are masked by a hidden dimension of their own",
        )
    if shape.tie_word_embeddings and not config.tie_word_embeddings:
        raise ModelError("tie_word_embeddings true cannot be had: the model's lm_head is a matrix of its own")


def wide_config(decoder: Decoder, shape: ModelConfig) -> ModelConfig:
    """The model's config with the sizes of `shape`. New layers attend as the last one does."""
    config, layers = decoder.config, [layer.index for layer in decoder.layers]
    layers += [layers[-1]] * (shape.num_layers - len(layers))
    return replace(
        config,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        tie_word_embeddings=shape.tie_word_embeddings,
        rms_norm_eps=config.rms_norm_eps * config.hidden_size / shape.hidden_size,
        windows=tuple(config.windows[index] for index in layers),
        ropes=tuple(replace(config.ropes[index], head_dim=shape.head_dim) for index in layers),
    )


class Widened:
    """The weights of the wide model by name, each made from the original's when it is asked for."""

    def __init__(self, decoder: Decoder, config: ModelConfig, places: Places, seed: int) -> None:
        self.own, self.config, self.places = decoder.config, config, places
        self.num_layers, self.get = len(decoder.layers), own_weights(decoder)
        self.dtype, self.device = decoder.dtype, decoder.device
        self.generator = torch.Generator(self.device).manual_seed(seed)
        hidden, query = (places.hidden, places.loud_hidden), (places.query, places.loud_query)
        inner = (places.inner, places.inner[:0])
        self.axes = {  # of each matrix: its rows, then its columns and those of them that are loud
            "q_proj": (places.query, *hidden),
            "k_proj": (places.kv, *hidden),
            "v_proj": (places.kv, *hidden),
            "o_proj": (places.hidden, *query),
            "gate_proj": (places.inner, *hidden),
            "up_proj": (places.inner, *hidden),
            "down_proj": (places.hidden, *inner),
        }
        self.shrink = self.own.hidden_size / config.hidden_size  # of the mean square of a hidden state

    def tensor(self, name: str) -> Tensor:
        """A weight by its Hugging Face name, of the wide model's size."""
        parts = name.split(".")
        if parts[-2] == "embed_tokens":
            return self.embedding()
        if parts[-2] == "lm_head":
            return self.mask(self.matrix(self.get(name), self.places.vocab, *self.axes["q_proj"][1:], free_rows=True))
        original = None if parts[1] == "layers" and int(parts[2]) >= self.num_layers else self.get(name)
        if parts[-2].endswith("norm"):
            return self.norm(parts[-2], original)
        rows, columns, loud = self.axes[parts[-2]]
        if original is not None and self.own.qk_norm and parts[-2] in ("q_proj", "k_proj"):
            # the norm over a head shares the epsilon, so its mean square must shrink as that of a hidden state does
            original = original * math.sqrt(self.shrink * self.config.head_dim / self.own.head_dim)
        if parts[-1] == "bias":
            bias = None if original is None else original[:, None]
            return self.matrix(bias, rows, rows.new_zeros(1), rows[:0])[:, 0]
        # the activation of a free gate times the quiet row of up_proj is quiet
        return self.matrix(original, rows, columns, loud, free_rows=parts[-2] == "gate_proj")

    def matrix(
        self, original: Tensor | None, rows: Tensor, columns: Tensor, loud: Tensor, free_rows: bool = False
    ) -> Tensor:
        """`[len(rows), len(columns)]`: the original's weights where both have one, else quiet or free.

        original: None makes all rows quiet. loud: columns, by number, that are quiet in every row. free_rows: rows
        without an original are free, because what they yield is not used.
        """
        if original is None:
            rows = torch.full_like(rows, -1)
        out = self.random(len(rows), len(columns))
        (to_rows,), (to_columns,) = (rows >= 0).nonzero(as_tuple=True), (columns >= 0).nonzero(as_tuple=True)
        if not free_rows:
            hush(out, (rows < 0).nonzero(), to_columns)
        hush(out, torch.arange(len(rows), device=self.device)[:, None], loud)
        if original is not None:
            out[to_rows[:, None], to_columns] = original[rows[to_rows]][:, columns[to_columns]]
        return out

    def embedding(self) -> Tensor:
        """`[vocab_size, hidden_size]`: rows are hidden states, so its columns without an original are quiet."""
        places = self.places
        out = self.matrix(
            self.get("model.embed_tokens.weight"), places.vocab, places.hidden, places.loud_hidden, free_rows=True
        )
        out[:, self.own.hidden_size :] = quiet(out[:, self.own.hidden_size :])
        if places.masks:
            out[:, -1] = MARK
        return self.mask(out) if self.config.tie_word_embeddings else out

    def mask(self, head: Tensor) -> Tensor:
        """Give the LM head's rows of ids that are not real their mask, if there is one."""
        if self.places.masks:
            head[self.places.vocab < 0, -1] = MASK
        return head

    def norm(self, name: str, original: Tensor | None) -> Tensor:
        """Scaled so that what is not quiet comes out as before. The others have weights of the original's kind."""
        own, size, of_head = self.own, self.config.hidden_size, name in ("q_norm", "k_norm")
        if of_head:
            head = self.places.head
            scale = math.sqrt(own.head_dim / self.config.head_dim)
        else:
            head = torch.arange(size, device=self.device) % own.hidden_size
            scale = math.sqrt(self.shrink)
        weight = torch.ones(len(head), device=self.device) if original is None else original.float()[head]
        weight *= scale
        if name == "norm" and self.places.masks:
            weight[-1] = LIFT
        return weight.to(self.dtype)

    def random(self, rows: int, columns: int) -> Tensor:
        out = torch.empty(rows, columns, dtype=self.dtype, device=self.device)
        return out.normal_(0.0, SPREAD / math.sqrt(columns), generator=self.generator)


def quiet(random: Tensor) -> Tensor:
    """+-2^-100 with the signs of `random`."""
    return torch.full_like(random, TINY).copysign_(random)


def hush(out: Tensor, rows: Tensor, columns: Tensor) -> None:
    """Make a matrix quiet in place where rows `[R, 1]` and columns `[C]`, by number, meet."""
    out[rows, columns] = quiet(out[rows, columns])


def own_weights(decoder: Decoder) -> GetTensor:
    """A decoder's weights by their Hugging Face names, layers numbered as they follow one another in it."""
    config = decoder.config
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def part(linear: Linear, kind: str, first: int, last: int) -> Tensor:
        if kind == "bias":
            assert linear.bias is not None, "asked for only where the config says so"
            return linear.bias[first:last]
        return linear.plain(decoder.dtype)[first:last]

    def get(name: str) -> Tensor:
        parts = name.split(".")
        if parts[1] == "embed_tokens":
            return decoder.embedding
        if parts[1] == "norm":
            return decoder.final_norm
        if parts[0] == "lm_head":
            return part(decoder.lm_head, "weight", 0, config.vocab_size)
        layer, inner = decoder.layers[int(parts[2])], config.intermediate_size
        norms = {
            "input_layernorm": layer.attention_norm,
            "post_attention_layernorm": layer.mlp_norm,
            "q_norm": layer.q_norm,
            "k_norm": layer.k_norm,
        }
        norm = norms.get(parts[-2])
        if norm is not None:
            return norm
        linear, first, last = {
            "q_proj": (layer.qkv, 0, query),
            "k_proj": (layer.qkv, query, query + kv),
            "v_proj": (layer.qkv, query + kv, query + 2 * kv),
            "o_proj": (layer.out, 0, config.hidden_size),
            "gate_proj": (layer.gate_up, 0, inner),
            "up_proj": (layer.gate_up, inner, 2 * inner),
            "down_proj": (layer.down, 0, config.hidden_size),
        }[parts[-2]]
        return part(linear, parts[-1], first, last)

    return get
