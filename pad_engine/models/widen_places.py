"""Where the parts of a model go in a larger shape: hidden dimensions, heads, rotary pairs, inner units and ids.

Used by widen.py, which says what stands in the places that are left.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pad_engine.errors import ModelError
from pad_engine.models.config import ModelConfig
from pad_engine.models.decoder import Decoder
from pad_engine.models.rope import RopeConfig, inverse_frequencies


def rotary_pairs(rope: RopeConfig, head_dim: int) -> Tensor:
    """For each pair of `rope`, int64 `[rope.head_dim / 2]`, the pair of the wider head that turns as fast.

    With the same base, pair i of h dimensions turns by theta^(-2i/h) a position, as pair i H/h of H dimensions does: so
    H is a multiple of h. Scalings that look at the frequency alone (linear, llama3) keep that, those that count
    dimensions (yarn, as a rule; dynamic, at lengths not known here) do not.
    """
    if head_dim == rope.head_dim:
        return torch.arange(head_dim // 2)
    if not rope.dynamic and head_dim % 2 == 0:
        own, wide = inverse_frequencies(rope)[0], inverse_frequencies(replace(rope, head_dim=head_dim))[0]
        closest = (wide[None] - own[:, None]).abs().min(-1)
        # the last bit may differ, as powers are taken eight or one at a time
        if bool((closest.values <= 3e-7 * own).all()) and len(closest.indices.unique()) == len(own):
            return closest.indices
    raise ModelError(
        f"head_dim {head_dim} lacks rotary frequencies that head_dim {rope.head_dim} has (rope_type {rope.rope_type})",
        f"choose a multiple of {rope.head_dim}; yarn and dynamic keep their head_dim",
    )


def kv_copies(config: ModelConfig, shape: ModelConfig) -> int:
    """Key heads that one of the model's becomes: more than one where the shape's groups are smaller."""
    return -(-(config.num_heads // config.num_kv_heads) // (shape.num_heads // shape.num_kv_heads))


@dataclass(frozen=True)
class Places:
    """For every place along an axis of the wide model its place in the original, or -1: int64 on the device.

    head: `[head_dim]` of one head. query, kv: `[heads * head_dim]` of all. hidden, inner, vocab: `[size]`. loud: places
    of an axis that have no original and yet are not quiet. masks: whether the last hidden dimension masks ids.
    """

    hidden: Tensor
    head: Tensor
    query: Tensor
    kv: Tensor
    inner: Tensor
    vocab: Tensor
    loud_hidden: Tensor
    loud_query: Tensor
    masks: bool


def make_places(decoder: Decoder, wide: ModelConfig, num_tokens: int) -> Places:
    """Where everything goes. num_tokens: ids of the original that are real; later ones are masked if any are."""
    config, device = decoder.config, decoder.device
    pairs = {tuple(rotary_pairs(config.ropes[layer.index], wide.head_dim).tolist()) for layer in decoder.layers}
    if len(pairs) > 1:
        raise ModelError(f"head_dim {wide.head_dim}: the model's layers place their rotary pairs differently")
    at = torch.tensor(pairs.pop())
    head = torch.full((wide.head_dim,), -1)
    head[at] = torch.arange(len(at))
    head[at + wide.head_dim // 2] = torch.arange(len(at)) + len(at)

    group, wide_group = config.num_heads // config.num_kv_heads, wide.num_heads // wide.num_kv_heads
    copies = kv_copies(config, wide)
    kv_heads = [i // copies if i < config.num_kv_heads * copies else -1 for i in range(wide.num_kv_heads)]
    heads = []
    for i in range(wide.num_heads):
        kv_head = i // wide_group
        member = kv_head % copies * wide_group + i % wide_group
        heads.append(kv_heads[kv_head] * group + member if kv_heads[kv_head] >= 0 and member < group else -1)

    def of_heads(originals: Sequence[int]) -> Tensor:
        first = torch.tensor(originals)[:, None] * config.head_dim
        return torch.where((first >= 0) & (head >= 0), first + head, -1).flatten()

    def longer(own: int, size: int) -> Tensor:
        return torch.cat((torch.arange(own), torch.full((size - own,), -1)))

    query, values = of_heads(heads), of_heads([kv_heads[i // wide_group] for i in range(wide.num_heads)])
    masks = wide.vocab_size > config.vocab_size
    loud_hidden = torch.tensor([wide.hidden_size - 1] if masks else [], dtype=torch.int64)
    return Places(
        hidden=longer(config.hidden_size, wide.hidden_size).to(device),
        head=head.to(device),
        query=query.to(device),
        kv=of_heads(kv_heads).to(device),
        inner=longer(config.intermediate_size, wide.intermediate_size).to(device),
        vocab=longer(num_tokens if masks else config.vocab_size, wide.vocab_size).to(device),
        loud_hidden=loud_hidden.to(device),
        loud_query=((query < 0) & (values >= 0)).nonzero().flatten().to(device),
        masks=masks,
    )
