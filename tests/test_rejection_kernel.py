"""Rejection on the card makes the host's decisions from the same random numbers, but for draws within a rounding of
p."""

import random
import warnings

import torch
from launches import CUDA, DEVICE, ints

from pad_engine.config import SamplingParams
from pad_engine.kernels.gumbel import ACCEPT, uniform
from pad_engine.kernels.rejection import RejectionWorkspace, rejection_chain
from pad_engine.record import Record
from pad_engine.rules import rejection
from pad_engine.state import State
from pad_engine.tree import DraftTree, make_forest

CASES = 2000 if CUDA else 5


def some_case(rng: random.Random) -> tuple[State, DraftTree, torch.Tensor, torch.Tensor]:
    """A chain whose tokens are often likely, with q near p, far from it, shorter than it, or not there."""
    n, vocab = rng.randint(1, 9), rng.choice([5, 70, 1500])
    gen = torch.Generator().manual_seed(rng.getrandbits(40))
    logits = torch.randn(n, vocab, generator=gen) * 2
    logits[:, rng.randrange(vocab)] = -torch.inf
    width = rng.choice([vocab, max(2, vocab - 3)])
    q = None
    if rng.random() < 0.7:
        q = (logits[:, :width] + torch.randn(n, width, generator=gen) * rng.choice([0.0, 0.5, 3.0])).softmax(-1)
    tokens = [0]
    for node in range(n - 1):
        row = q[node] if q is not None else logits[node].softmax(-1)
        tokens.append(int(torch.multinomial(row, 1, generator=gen)))
    state = State(
        [1] * rng.randint(1, 50),
        1,
        200,
        SamplingParams(9, rng.choice([0.3, 1.0, 1.7])),
        rng.getrandbits(53),
        frozenset(),
    )
    state.round = rng.randrange(5)
    pick = torch.where(torch.rand(n, generator=gen) < 0.03, -1, 0).int()
    return state, DraftTree(tokens, list(range(-1, n - 1)), q_rows=q), logits, pick


def near(state: State, tree: DraftTree, logits: torch.Tensor) -> bool:
    """Whether a draw lies so near to p / q that roundings may decide."""
    p = (logits.double() / state.params.temperature).softmax(-1)
    for node in range(1, len(tree)):
        token = tree.tokens[node]
        chance = 1.0 if tree.q_rows is None else float(tree.q_rows[node - 1, token])
        u = uniform(state.seed, len(state.ids) - 1 + node, token, ACCEPT, state.round)
        if abs(u * chance - float(p[node - 1, token])) < 1e-5 * max(float(p[node - 1, token]), 1e-3):
            return True
    return False


def test_chains_are_decided_as_on_the_host() -> None:
    rng, kept, ends, skipped = random.Random(1), 0, 0, 0
    workspace = RejectionWorkspace(64, DEVICE)
    for _ in range(CASES):
        state, tree, logits, pick = some_case(rng)
        if near(state, tree, logits):
            skipped += 1
            continue
        record = Record(make_forest([tree], [0]), logits, logits, pick, {})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # log of 0
            expected = rejection.walk_path(record, 0, state, tree)
            rejection_chain(
                logits.to(DEVICE), None if tree.q_rows is None else tree.q_rows.to(DEVICE), ints(tree.tokens),
                pick.to(DEVICE), workspace, temperature=state.params.temperature, position=len(state.ids) - 1,
                seed=state.seed, round_index=state.round,
            )  # fmt: skip
        assert workspace.out.tolist() == [len(expected.path) - 1, expected.end_token]
        kept, ends = kept + len(expected.path) - 1, ends + (expected.end_token >= 0)
    assert kept > CASES // 2 and ends > CASES // 2 and skipped <= max(1, CASES // 10)
    assert not workspace.ticket.any()
