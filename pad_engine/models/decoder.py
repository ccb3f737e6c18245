"""The target and every draft model: one decoder-only transformer for all supported families, told apart by flags.

A pass takes rows of a forest (kv_cache.Placement), whatever they are: a prompt's chunk, one token, a chain, a tree.
Next to read: verify.py, which makes such rows of draft trees.
"""

from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pad_engine.kernels.gated_act import gated_act
from pad_engine.kernels.linear import Linear
from pad_engine.kernels.prefill_attention import library_attention, prefill_attention
from pad_engine.kernels.rms_norm import rms_norm
from pad_engine.kernels.rope import rope
from pad_engine.kernels.tree_attention import tree_attention_ref
from pad_engine.kv_cache import KVCache, Placement, Span
from pad_engine.kv_forest import ForestPlacement, attend, write
from pad_engine.models.config import ModelConfig
from pad_engine.models.quantise import quantised_linear
from pad_engine.models.rope import RopeConfig, RopeTable

GetTensor = Callable[[str], Tensor]
Angles = dict[RopeConfig, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Layer:
    """The weights of one block. Gemma has a norm after attention and after the MLP as well, and the others do not."""

    index: int
    attention_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    attention_post_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    mlp_post_norm: Tensor | None


class Decoder:
    """A model's weights on one device, and its forward pass.

    get: gives a weight by its Hugging Face name, on the wanted device and in the wanted type. max_length: the longest
    sequence, in tokens, that rotary tables are made for. quantised: the type of one byte that matrices are kept in
    (quantise.py), or None.
    """

    def __init__(
        self, config: ModelConfig, get: GetTensor, max_length: int, quantised: torch.dtype | None = None
    ) -> None:
        self.config, self.max_length, self.quantised = config, max_length, quantised
        self.embedding = get("model.embed_tokens.weight")
        self.dtype, self.device = self.embedding.dtype, self.embedding.device
        self.layers = [self._load_layer(index, get) for index in range(config.num_layers)]
        self.final_norm = self._norm_weight(get, "model.norm.weight")
        head = self.embedding if config.tie_word_embeddings else get("lm_head.weight")
        # quantised, a tied head is a matrix of its own: a lookup reads one row, and so need not lose anything
        self.lm_head = quantised_linear([("lm_head.weight", head)], None, quantised) if quantised else Linear(head)
        self.head_ids: Tensor | None = None  # the tokens of its rows, where these are not the first ids
        # Gemma's scale is rounded to the model's type before the product, as its checkpoints were trained
        self.embed_scale = torch.tensor(config.hidden_size**0.5, dtype=self.dtype).item() if config.gemma else None
        self.ropes = {rope: RopeTable(rope, max_length, self.dtype, self.device) for rope in set(config.ropes)}

    def _norm_weight(self, get: GetTensor, name: str) -> Tensor:
        weight = get(name)
        return weight.float() + 1.0 if self.config.gemma else weight

    def _load_layer(self, index: int, get: GetTensor) -> Layer:
        config, prefix = self.config, f"model.layers.{index}."

        def linear(names: Sequence[str], bias: bool) -> Linear:
            weights = ((f"{prefix}{name}.weight", get(f"{prefix}{name}.weight")) for name in names)
            biases = torch.cat([get(f"{prefix}{name}.bias") for name in names]) if bias else None
            if self.quantised is not None:
                return quantised_linear(weights, biases, self.quantised)
            return Linear(torch.cat([weight for _, weight in weights]), biases)

        def norm(name: str, present: bool = True) -> Tensor | None:
            return self._norm_weight(get, f"{prefix}{name}.weight") if present else None

        attention_norm = self._norm_weight(get, f"{prefix}input_layernorm.weight")
        # Gemma gives the name that the others use for the norm before the MLP to the norm after attention
        mlp_norm = "pre_feedforward_layernorm" if config.gemma else "post_attention_layernorm"
        return Layer(
            index=index,
            attention_norm=attention_norm,
            qkv=linear([f"self_attn.{x}_proj" for x in "qkv"], config.qkv_bias),
            q_norm=norm("self_attn.q_norm", config.qk_norm),
            k_norm=norm("self_attn.k_norm", config.qk_norm),
            out=linear(["self_attn.o_proj"], config.o_bias),
            attention_post_norm=norm("post_attention_layernorm", config.gemma),
            mlp_norm=self._norm_weight(get, f"{prefix}{mlp_norm}.weight"),
            gate_up=linear(["mlp.gate_proj", "mlp.up_proj"], config.mlp_bias),
            down=linear(["mlp.down_proj"], config.mlp_bias),
            mlp_post_norm=norm("post_feedforward_layernorm", config.gemma),
        )

    def with_layers(self, kept: Sequence[int]) -> "Decoder":
        """The same weights with only these layers, in this order: a self-draft. It needs a cache of its own."""
        draft = copy(self)
        draft.layers = [self.layers[index] for index in kept]
        return draft

    def with_head(self, ids: Sequence[int]) -> "Decoder":
        """The same weights with an LM head of these tokens alone, ids in ascending order and none of them twice. One of
        the first ids is a view where nothing is packed; any other is a copy."""
        draft = copy(self)
        first = ids[-1] == len(ids) - 1
        draft.head_ids = None if first else torch.tensor(ids, device=self.device)
        draft.lm_head = self.lm_head.rows(slice(len(ids)) if draft.head_ids is None else draft.head_ids)
        return draft

    @property
    def dynamic(self) -> bool:
        """Whether a token's key depends on the length of the sequence that it was read in."""
        return any(rope.dynamic for rope in self.ropes)

    def new_cache(self, *, num_seqs: int = 1, capacity: int, scratch: int) -> KVCache:
        """An empty cache for this model's layers: `capacity` committed tokens a sequence, `scratch` rows a pass."""
        config = self.config
        return KVCache(
            [config.windows[layer.index] for layer in self.layers],
            config.num_kv_heads,
            config.num_heads // config.num_kv_heads,
            config.head_dim,
            num_seqs=num_seqs,
            capacity=capacity,
            scratch=scratch,
            dtype=self.dtype,
            device=self.device,
        )

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens: int64 `[N]`; returns the first layer's input `[N, hidden_size]`."""
        hidden = F.embedding(tokens, self.embedding)
        return hidden if self.embed_scale is None else hidden * self.embed_scale

    def forward(
        self, placement: Placement | ForestPlacement, cache: KVCache, taps: Collection[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run all layers over a pass's rows.

        Returns the last layer's output `[N, hidden_size]`, before the final norm, and the outputs of the layers named
        in `taps` (0-based, as in the checkpoint).
        """
        return self.forward_range(0, len(self.layers), self.embed(placement.tokens), placement, cache, taps)

    def forward_range(
        self, first: int, last: int, hidden: Tensor, placement: Placement | ForestPlacement, cache: KVCache,
        taps: Collection[int] = (),
    ) -> tuple[Tensor, dict[int, Tensor]]:  # fmt: skip
        """Run layers [first, last), on hidden states `[N, hidden_size]` that an earlier range left off with.

        Ranges of one placement that follow one another equal one forward, and may stop anywhere.
        """
        angles = {rope: table.rows(placement.positions, placement.prompt_lengths) for rope, table in self.ropes.items()}
        tapped: dict[int, Tensor] = {}
        with library_attention(self.device):
            for position in range(first, last):
                layer = self.layers[position]
                hidden = hidden + self._attention(layer, position, hidden, placement, cache, angles)
                hidden = hidden + self._mlp(layer, hidden)
                if layer.index in taps:
                    tapped[layer.index] = hidden
        return hidden, tapped

    def _attention(
        self, layer: Layer, position: int, hidden: Tensor, placement: Placement | ForestPlacement, cache: KVCache,
        angles: Angles,
    ) -> Tensor:  # fmt: skip
        config = self.config
        heads, kv_heads, n = config.num_heads, config.num_kv_heads, hidden.shape[0]
        qkv = layer.qkv(rms_norm(hidden, layer.attention_norm, config.rms_norm_eps))
        qkv = qkv.view(n, heads + 2 * kv_heads, config.head_dim)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            for part, weight in ((qk[:, :heads], layer.q_norm), (qk[:, heads:], layer.k_norm)):
                rms_norm(part, weight, config.rms_norm_eps, out=part)
        qk = rope(qk, *angles[config.ropes[layer.index]])
        q, k = qk[:, :heads], qk[:, heads:]
        attended = layer.out(self._attend_all(position, q, k, v, placement, cache))
        if layer.attention_post_norm is not None:
            attended = rms_norm(attended, layer.attention_post_norm, config.rms_norm_eps)
        return attended

    def _attend_all(
        self, position: int, q: Tensor, k: Tensor, v: Tensor, placement: Placement | ForestPlacement, cache: KVCache
    ) -> Tensor:
        if isinstance(placement, ForestPlacement):
            write(cache, position, placement, k, v)
            return attend(cache, position, placement, q, self.config.attention_scale, self.config.attention_softcap)
        parts = []
        for span in placement.spans:
            cache.write(position, span, k[span.rows], v[span.rows])
            parts.append(self._attend(position, q[span.rows], span, cache))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend(self, position: int, q: Tensor, span: Span, cache: KVCache) -> Tensor:
        keys, values, view = cache.read(position, span)
        scale, softcap = self.config.attention_scale, self.config.attention_softcap
        if view.causal:
            return prefill_attention(q, keys, values, scale, softcap)
        return tree_attention_ref(q, keys, values, view.mask, scale, softcap)

    def _mlp(self, layer: Layer, hidden: Tensor) -> Tensor:
        config = self.config
        gate_up = layer.gate_up(rms_norm(hidden, layer.mlp_norm, config.rms_norm_eps))
        out = layer.down(gated_act(gate_up, config.hidden_act))
        if layer.mlp_post_norm is not None:
            out = rms_norm(out, layer.mlp_post_norm, config.rms_norm_eps)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: `[N, hidden_size]` as forward returns it; returns fp32 `[N, vocab_size]`, soft-capped if so set. Of
        an LM head of some tokens alone, ids that it lacks have -inf; after the first ids the row ends."""
        logits = self.lm_head(rms_norm(hidden, self.final_norm, self.config.rms_norm_eps)).float()
        if self.config.logit_softcap is not None:
            logits = self.config.logit_softcap * torch.tanh(logits / self.config.logit_softcap)
        if self.head_ids is None:
            return logits
        whole = logits.new_full((len(logits), self.config.vocab_size), -torch.inf)
        return whole.index_copy_(1, self.head_ids, logits)


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors that a checkpoint of this config must hold."""
    d, width = config.hidden_size, config.head_dim
    q, kv = config.num_heads * width, config.num_kv_heads * width
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, d),
        "model.norm.weight": (d,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, d)
    matrices = {
        "self_attn.q_proj": (q, d, config.qkv_bias),
        "self_attn.k_proj": (kv, d, config.qkv_bias),
        "self_attn.v_proj": (kv, d, config.qkv_bias),
        "self_attn.o_proj": (d, q, config.o_bias),
        "mlp.gate_proj": (config.intermediate_size, d, config.mlp_bias),
        "mlp.up_proj": (config.intermediate_size, d, config.mlp_bias),
        "mlp.down_proj": (d, config.intermediate_size, config.mlp_bias),
    }
    norms = {"input_layernorm": d, "post_attention_layernorm": d}
    if config.gemma:
        norms |= {"pre_feedforward_layernorm": d, "post_feedforward_layernorm": d}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": width, "self_attn.k_norm": width}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        for name, (rows, columns, bias) in matrices.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        shapes |= {f"{prefix}{name}.weight": (size,) for name, size in norms.items()}
    return shapes
