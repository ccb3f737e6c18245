"""What a request asks to be done to the target's logits before a token is picked: penalties, biases, filters.

Order: repetition, presence and frequency penalties, logit bias, tokens that may not come yet, then the filters top-k,
top-p and min-p, which look at the distribution at the request's temperature. The result is on the scale of the raw
logits, with -inf for tokens that are filtered out, so that the pick (kernels/gumbel.py) is the same with and without.
A row of a tree sees the prompt, what was committed, and its own ancestors: never what another branch proposed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pad_engine.config import SamplingParams
from pad_engine.state import State


def has_penalties(params: SamplingParams) -> bool:
    """Whether the tokens that came before matter."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def has_filters(params: SamplingParams) -> bool:
    """Whether unlikely tokens are cut off. At temperature 0 the largest logit always survives, so filters do
    nothing."""
    return not params.greedy and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)


def changes_logits(params: SamplingParams) -> bool:
    """Whether the request asks for anything that `transform` does."""
    return has_penalties(params) or has_filters(params) or bool(params.logit_bias) or params.min_tokens > 0


def transform(logits: Tensor, state: State, paths: Sequence[Sequence[int]]) -> Tensor:
    """Do to the rows of one sequence what its request asks for.

    logits: fp32 `[n, V]`, raw. paths: for each row the drafted tokens from the root's child to the row's own token
    (none for the root). Returns fp32 `[n, V]`; the same tensor when nothing was asked for.
    """
    params = state.params
    if has_penalties(params):
        logits = penalise(logits, state, paths)
    # a draft model may not have all of the target's ids
    biases = {token: bias for token, bias in params.logit_bias.items() if token < logits.shape[1]}
    if biases:
        ids = torch.tensor(list(biases), device=logits.device)
        bias = torch.tensor(list(biases.values()), dtype=torch.float32, device=logits.device)
        logits = logits.index_add(1, ids, bias.expand(len(logits), -1))
    count = len(state.ids) - state.prompt_length
    early = [row for row, path in enumerate(paths) if count + len(path) < params.min_tokens]
    if early and (forbidden := [token for token in state.end_ids if token < logits.shape[1]]):
        logits = logits.clone()
        rows, ids = torch.tensor(early, device=logits.device), torch.tensor(forbidden, device=logits.device)
        logits[rows[:, None], ids] = -torch.inf
    return keep_likely(logits, params) if has_filters(params) else logits


def penalise(logits: Tensor, state: State, paths: Sequence[Sequence[int]]) -> Tensor:
    """Repetition (Keskar et al. 2019, section 4.1): logits of tokens in prompt or answer are divided by the penalty
    when positive and multiplied when negative. Presence and frequency count the answer only: each token that came loses
    `presence + frequency * times`."""
    params, device, vocab = state.params, logits.device, logits.shape[1]
    counts = count_tokens(state.generated, vocab).repeat(len(paths), 1)
    for row, path in enumerate(paths):
        counts[row] += count_tokens(path, vocab)
    seen = (counts > 0) | (count_tokens(state.ids[: state.prompt_length], vocab) > 0)
    counts, seen = counts.to(device), seen.to(device)
    if params.repetition_penalty != 1.0:
        penalised = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
        logits = torch.where(seen, penalised, logits)
    return logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)


def count_tokens(tokens: Sequence[int], vocab: int) -> Tensor:
    """How often each id below `vocab` occurs: int64 `[vocab]`. Ids that a draft model does not have are left out."""
    return torch.bincount(torch.tensor(tokens, dtype=torch.int64), minlength=vocab)[:vocab]


def keep_likely(logits: Tensor, params: SamplingParams) -> Tensor:
    """Top-k, then top-p (Holtzman et al. 2020) of what is left, then min-p (Nguyen et al. 2024) of what is left.

    Top-k keeps exactly k tokens and top-p the shortest beginning of the ranking that reaches p; equal logits rank by
    id.
    """
    ranked = logits.sort(dim=-1, descending=True, stable=True)
    values = ranked.values
    if 0 < params.top_k < values.shape[1]:
        values = values.clone()
        values[:, params.top_k :] = -torch.inf
    p = (values / params.temperature).softmax(-1)
    keep = values > -torch.inf
    if params.top_p < 1.0:
        keep &= p.cumsum(-1) - p < params.top_p
    if params.min_p > 0.0:
        p = p.masked_fill(~keep, 0.0)
        keep &= p >= params.min_p * p[:, :1]
    keep[:, 0] = True
    return logits.masked_fill(~torch.zeros_like(keep).scatter(1, ranked.indices, keep), -torch.inf)
