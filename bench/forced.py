"""Random weights whose next token is known, so that a draft model is right as often as a benchmark asks.

Random models agree on nothing, and a rule that was told to accept anyway would measure another program. Here the
weights themselves say what follows: the successor of id t is t + 1. A token's embedding outweighs all that the layers
add, and the LM head's row of t + 1 is the embedding of t. So target and draft model agree at every temperature and in
every rounding, and nothing of a round differs from real use: it drafts, verifies, accepts and commits.

The draft model is made wrong behind some ids (there the row of t + 1 is turned round), which cuts an answer into
segments: a round that starts at one accepts up to its end, and the target's own token starts the next. Their lengths
are the tokens of the rounds. Next to read: bench_round.py.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from shapes import random_weights, shape_config

from pad_engine.models.config import ModelConfig
from pad_engine.models.decoder import Decoder, GetTensor

# of the matrices that end a block: what the layers add stays small beside an embedding of ordinary size
QUIET = 2.0**-6
PEAK = 60.0  # nats from the successor to an ordinary token: more than a draw's noise over any vocabulary
STEPS = 100  # tokens a round are hundredths


def segment_lengths(tokens_per_round: float, depth: int) -> list[int]:
    """The tokens of each round of one period, whose mean is exactly `tokens_per_round`; they differ by one at most.

    ValueError for what rounds of `depth` drafted tokens cannot give, or what is not a whole number of hundredths.
    """
    hundredths = round(tokens_per_round * STEPS)
    if abs(hundredths - tokens_per_round * STEPS) > 1e-6 or not STEPS <= hundredths <= (depth + 1) * STEPS:
        raise ValueError(f"{tokens_per_round} tokens a round: expected hundredths in [1, {depth + 1}]")
    ends = [hundredths * turn // STEPS for turn in range(STEPS // math.gcd(hundredths, STEPS) + 1)]
    return [end - start for start, end in pairwise(ends)]


def wrong_after(lengths: Sequence[int], vocab: int) -> list[int]:
    """The ids behind which the draft model errs: the last of each segment, from id 0 on, as long as they fit."""
    period = list(accumulate(lengths))
    return [turn * period[-1] + end - 1 for turn in range(vocab // period[-1]) for end in period]


def successor_weights(get: GetTensor, config: ModelConfig, wrong: Sequence[int] = ()) -> GetTensor:
    """The weights of `get`, changed as above. config: with a matrix of its own for the LM head."""
    embedding: list[torch.Tensor] = []

    def changed(name: str) -> torch.Tensor:
        if name == "lm_head.weight":
            head = embedding[0].roll(1, 0) * (PEAK / config.hidden_size)
            turned = (torch.tensor(wrong, dtype=torch.int64, device=head.device) + 1) % len(head)
            head[turned] *= -1
            return head
        weight = get(name)
        if name == "model.embed_tokens.weight":
            weight /= weight.float().square().mean().sqrt()
            embedding.append(weight)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            weight *= QUIET
        return weight

    return changed


def successor_decoder(
    shape: str,
    device: torch.device,
    dtype: torch.dtype,
    max_length: int,
    num_layers: int | None = None,
    wrong: Sequence[int] = (),
) -> Decoder:
    """A decoder of a shape of shapes.py in which t + 1 follows t, but behind the ids `wrong`. Its LM head is always a
    matrix of its own, which costs a step nothing: it is read once either way."""
    config = replace(shape_config(shape, max_length, num_layers), tie_word_embeddings=False)
    return Decoder(config, successor_weights(random_weights(config, device, dtype), config, wrong), max_length)


def pair(
    target: str, draft: str, draft_layers: int | None, tokens_per_round: float, depth: int, max_length: int,
    device: torch.device, dtype: torch.dtype = torch.bfloat16,
) -> tuple[Decoder, Decoder, list[int]]:  # fmt: skip
    """Target, draft model, and the lengths of one period of rounds. A prompt that ends with id 0 starts at the first.

    ValueError when the models have other vocabularies, or as segment_lengths says.
    """
    lengths = segment_lengths(tokens_per_round, depth)
    vocab = shape_config(target, max_length).vocab_size
    if shape_config(draft, max_length).vocab_size != vocab:
        raise ValueError(f"a {draft} does not draft for a {target}: their vocabularies differ")
    drafting = successor_decoder(draft, device, dtype, max_length, draft_layers, wrong_after(lengths, vocab))
    return successor_decoder(target, device, dtype, max_length), drafting, lengths
