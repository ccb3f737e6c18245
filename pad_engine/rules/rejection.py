"""Speculative sampling (Leviathan et al. 2023, algorithm 1; Chen et al. 2023, theorem 1), on trees by recursive
rejection: siblings are tried in turn, each against what the ones before it left of the target's distribution.

A token x drawn from q stays with probability min(1, p(x) / q(x)); when it is rejected, p becomes the residual
norm(max(p - q, 0)) and, for the next sibling, q loses x, because siblings are drawn without replacement. A drafter that
draws nothing has q = 1 at its token. p and q are the processed distributions, in the test and in the residual alike.
"""

import torch
from torch import Tensor

from pad_engine.kernels.gumbel import ACCEPT, RESIDUAL, uniform
from pad_engine.record import Record
from pad_engine.rules.greedy import judge_pick
from pad_engine.rules.override import Relaxed
from pad_engine.rules.rule import AcceptanceRule, Accepted
from pad_engine.sampling import gumbel_noise
from pad_engine.state import Overridden, State
from pad_engine.tree import DraftTree


def walk_path(record: Record, start: int, state: State, tree: DraftTree, relaxed: Relaxed | None = None) -> Accepted:
    """The accepted nodes from the root on, and the token after them.

    relaxed: a child that rejection leaves may still be kept by an override, the one of the best score; or a row that
    hesitates takes either of its two likeliest tokens, the second within the override's bounds, and weighs nothing.
    """
    path, children, history = [0], tree.children, state.history
    overridden: list[Overridden] = []
    while True:
        node = path[-1]
        if record.picks[start + node] < 0:
            return Accepted(path, -1, tuple(overridden))
        row = record.processed[start + node]
        p = target_probs(row, state)
        position = len(state.ids) + len(path) - 1
        pair = [] if relaxed is None else hesitates(row, relaxed.override.either)
        accepted, rescued = None, None
        if pair:
            if relaxed is not None and not relaxed.may_take(start + node, pair[1], history):
                pair.pop()
            accepted = next((child for child in children[node] if tree.tokens[child] in pair), None)
            rescued = accepted if accepted is not None and tree.tokens[accepted] != pair[0] else None
        else:
            accepted, p = try_children(p, tree, children[node], state, position)
            if accepted is None and relaxed is not None and relaxed.override.either >= 1.0:
                accepted = rescued = relaxed.rescue(children[node], start, history)
        if accepted is None:
            return Accepted(path, draw(p, state, position), tuple(overridden))
        if rescued is not None and relaxed is not None:
            overridden.append(relaxed.describe(start + rescued, rescued))
        history = history << 1 | (rescued is not None)
        path.append(accepted)


def hesitates(row: Tensor, either: float) -> list[int]:
    """The two likeliest tokens of a row of processed logits `[V]`, if z1 > 0 and z2 / z1 > either (MARS as released,
    which divides by any z1: below 0 the ratio is above 1 for every token, those that a filter cut off included)."""
    if either >= 1.0:
        return []
    order = row.float().sort(descending=True, stable=True)
    z1, z2 = order.values[:2].tolist()
    return order.indices[:2].tolist() if z1 > 0 and z2 / (z1 + 1e-10) > either else []


def target_probs(logits: Tensor, state: State) -> Tensor:
    """softmax(logits / T) in fp64 `[V]`; at temperature 0 all of it on the first largest logit."""
    row = logits.double().cpu()
    if state.params.greedy:
        return torch.zeros_like(row).index_fill_(0, row.argmax(), 1.0)
    return ((row - row.max()) / state.params.temperature).softmax(-1)


def try_children(
    p: Tensor, tree: DraftTree, children: list[int], state: State, position: int
) -> tuple[int | None, Tensor]:
    """The first child that stays, if any, and what is left of the target's distribution `[V]` behind those before it.

    position: of the children's tokens in the sequence.
    """
    q = None
    if children:
        q = None if tree.q_rows is None else tree.q_rows[tree.parents[children[0]]].double().cpu()
        # ids that only one of the two knows are impossible for the other
        width = max(len(p), 0 if q is None else len(q), 1 + max(tree.tokens[child] for child in children))
        p, q = widen(p, width), None if q is None else widen(q, width)
    for child in children:
        token = tree.tokens[child]
        chance = 1.0 if q is None else float(q[token])
        # strictly below: a token that the target excludes does not stay at a draw of 0 either
        if uniform(state.seed, position, token, ACCEPT, state.round) * chance < float(p[token]):
            return child, p
        p = residual(p, token, q)
        if q is not None:
            q[token] = 0.0
            q = q / q.sum() if float(q.sum()) > 0 else q
    return None, p


def widen(row: Tensor, width: int) -> Tensor:
    """A copy of the row with zeros behind it: `[width]`."""
    return torch.cat((row, row.new_zeros(width - len(row))))


def residual(p: Tensor, token: int, q: Tensor | None) -> Tensor:
    """norm(max(p - q, 0)); q is one at the token where nothing was drawn."""
    left = (p - q).clamp_(min=0.0) if q is not None else p.index_fill(0, torch.tensor(token), 0.0)
    total = float(left.sum())
    # nothing left means that p and q were equal but for rounding, where a rejection has no weight
    return left / total if total > 0 else p


def draw(p: Tensor, state: State, position: int) -> int:
    """One token from p `[V]`, by the Gumbel argmax of its logarithm with noise of this draw's own."""
    noise = gumbel_noise(state.seed, position, len(p), torch.device("cpu"), RESIDUAL, state.round)
    return int((p.log() + noise).argmax())


REJECTION = AcceptanceRule(
    "rejection",
    judge_pick,
    end="residual(p - q)",
    rows="walk",
    walk="sequential",
    lossless=True,
    walk_path=walk_path,
)
