"""A request's rounds on the device: queued ahead where the drafter runs there too, else one at a time.

Next to read: graphs.py for what is queued, engine.py for what becomes of the commits.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from pad_engine.controller import Controller, RoundPlan
from pad_engine.device_round import MAX_END_IDS
from pad_engine.drafters.drafter import CapturedDrafter, Drafter
from pad_engine.errors import NonFiniteError
from pad_engine.graphs import Rounds
from pad_engine.kernels.accept_path import NOT_FINITE, RUNNING
from pad_engine.kv_cache import KVCache
from pad_engine.output import Stopwatch
from pad_engine.rules.greedy import judge_pick
from pad_engine.rules.rule import AcceptanceRule
from pad_engine.state import Commit, Overridden, State
from pad_engine.transforms import changes_logits
from pad_engine.tree import DraftTree


@dataclass(frozen=True)
class Played:
    """One round: what it committed, the raw logits fp32 `[N, V]` of its tree where they were kept, and what it cost.
    A draft on the device is part of its round. budget: what was planned for it. typical: False where a graph was made
    meanwhile."""

    commit: Commit
    logits: Tensor | None
    draft_ms: float
    verify_ms: float
    budget: int
    typical: bool = True


def serves(rounds: Rounds, state: State, rule: AcceptanceRule, drafter: Drafter) -> bool:
    """Whether the accept kernel can decide all of this request: its logits are needed by nobody else."""
    captured = None if rounds.judge is None else rounds.judge.override
    params = state.params
    return (
        rule.judge is judge_pick
        and rule.walk_path is None
        and rule.override is captured
        and params.logprobs is None
        and not drafter.taps
        and len(state.end_ids) <= MAX_END_IDS
        and not changes_logits(params)
    )


def draft(state: State, drafter: Drafter, controller: Controller, pinned: bool) -> tuple[DraftTree, float]:
    """The next round's tree, of the size that the controller decides, and the milliseconds that it took."""
    clock = Stopwatch()
    state.plan = controller.decide(drafter.evidence(state), state.remaining, pinned)
    return drafter.propose(state), clock.lap()


def play(
    rounds: Rounds,
    cache: KVCache,
    state: State,
    drafter: Drafter,
    controller: Controller,
    pinned: bool,
    cancelled: Callable[[], bool],
) -> Iterator[Played]:
    """The rounds of a request that `serves` said yes to, until it is finished or cancelled."""
    temperature = 0.0 if state.params.greedy else state.params.temperature
    limit = len(state.ids) + state.remaining
    rounds.begin(state.seq, state.ids, limit, sorted(state.end_ids), state.seed, temperature)
    if drafter.captured:
        yield from run_ahead(rounds, cache, state, cast(CapturedDrafter, drafter), controller, pinned, cancelled)
        return
    while state.finish_reason is None and not cancelled():
        tree, draft_ms = draft(state, drafter, controller, pinned)
        clock = Stopwatch()
        index = rounds.queue_plain() if len(tree) == 1 else rounds.queue_tree([tree])
        rounds.wait(index)
        commit = read_commit(rounds, cache, state, index, tree)
        yield Played(commit, None, draft_ms, clock.lap(), state.plan.budget)


def run_ahead(
    rounds: Rounds,
    cache: KVCache,
    state: State,
    drafter: CapturedDrafter,
    controller: Controller,
    pinned: bool,
    cancelled: Callable[[], bool],
) -> Iterator[Played]:
    """Rounds of which the host decides no more than the size, and that from all rounds but the one at work: each is
    queued before the one before it is read."""
    clock, root, ended = Stopwatch(), state.root, False
    unread: deque[int] = deque()
    plans: dict[int, tuple[RoundPlan, int]] = {}  # of rounds at work, with the depth that was drafted
    atypical: set[int] = set()

    def queue() -> None:
        graphs = rounds.num_graphs
        plan = controller.decide(drafter.evidence(state), state.remaining - len(unread), pinned)
        index, depth = drafter.queue(rounds, plan)
        unread.append(index)
        plans[index] = plan, depth
        if rounds.num_graphs > graphs:
            atypical.update(unread)

    queue()
    try:
        while state.finish_reason is None and not cancelled():
            # a round emits one token at least, so the last token needs no round behind it
            if state.remaining > 1:
                queue()
            rounds.wait(unread[0])
            index = unread.popleft()
            plan, depth = plans.pop(index)
            commit = read_commit(rounds, cache, state, index, depth)
            root, ended = commit.tokens[-1], state.finish_reason is not None
            yield Played(commit, None, 0.0, clock.lap(), plan.budget, index not in atypical)
    finally:
        # where the answer ended on the host, what rounds queued behind it wrote is accounted for, so that the next
        # request can tell what is left of the cache
        for index in () if ended else unread:
            rounds.wait(index)
            tokens, _, _, _ = rounds.reports.read(index, state.seq)
            cache.advance(state.seq, [root, *tokens[:-1]] if tokens else [])
            root = tokens[-1] if tokens else root


def read_commit(rounds: Rounds, cache: KVCache, state: State, index: int, drafted: DraftTree | int) -> Commit:
    """What a round that has reported committed, entered into the host's state. drafted: its tree, or the depth of one
    that the device made."""
    tokens, accepted, status, rows = rounds.reports.read(index, state.seq)
    if status == NOT_FINITE:
        raise NonFiniteError(f"the target's logits after position {len(state.ids) - 1} are not finite")
    if isinstance(drafted, DraftTree):
        tree = drafted
    else:  # what would stand behind the answer's last token was not drafted
        tree = stand_in(state.root, tokens[:accepted], rows, min(drafted, state.remaining - 1))
    cache.advance(state.seq, [state.root, *tokens[:-1]])
    path = path_of(tree, tokens[:accepted])
    overridden: tuple[Overridden, ...] = ()
    if rounds.judge is not None and accepted:
        found = rounds.reports.overrides(index, state.seq, accepted)
        overridden = tuple(Overridden(path[1 + place], *numbers) for place, *numbers in found)
    commit = state.commit(tree, path, tokens[-1], overridden)
    assert commit.tokens == tokens and (status != RUNNING) == (state.finish_reason is not None), (
        "host and device disagree"
    )
    return commit


def stand_in(root: int, accepted: list[int], rows: int, depth: int) -> DraftTree:
    """For a tree that the device made, of which only the rows that were kept are known: so many rows, as deep as was
    drafted, and the others beside them. What is not known is the root's token."""
    tokens = [root, *accepted, *[root] * (rows - 1 - len(accepted))]
    deep = max(len(accepted), min(depth, rows - 1))
    return DraftTree(tokens, [*range(-1, deep), *[0] * (rows - 1 - deep)])


def path_of(tree: DraftTree, tokens: list[int]) -> list[int]:
    """The nodes from the root along these tokens; of twins the first, as the rules have it."""
    path, children = [0], tree.children
    for token in tokens:
        path.append(next(child for child in children[path[-1]] if tree.tokens[child] == token))
    return path
