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
    meanwhile, or the device waited for a plain round. depth, rows: as planned, of a draft on the device, whose tree
    shows only what was found."""

    commit: Commit
    logits: Tensor | None
    draft_ms: float
    verify_ms: float
    budget: int
    typical: bool = True
    depth: int | None = None
    rows: int | None = None


@dataclass(frozen=True)
class AtWork:
    """A round that was queued and not read. drafted: its tree, or the depth of one that the device makes. evidence: the
    drafter's class when it was planned."""

    index: int
    plan: RoundPlan
    drafted: DraftTree | int
    evidence: int
    draft_ms: float


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
    """The rounds of a request that `serves` said yes to, until it is finished or cancelled.

    A plain round, and one whose draft the device makes, is queued before the one before it is read: of what is at work
    the host then knows no more than that it emits a token. A draft of the host's own needs all tokens, and its round
    waits for them.
    """
    temperature = 0.0 if state.params.greedy else state.params.temperature
    limit = len(state.ids) + state.remaining
    rounds.begin(state.seq, state.ids, limit, sorted(state.end_ids), state.seed, temperature)
    clock, root, ended = Stopwatch(), state.root, False
    unread: deque[AtWork] = deque()
    atypical: set[int] = set()

    def queue() -> None:
        room = state.remaining - len(unread)
        if room < 1:
            return
        own, graphs = Stopwatch(), rounds.num_graphs
        evidence = drafter.evidence(state)
        plan = controller.decide(evidence, room, pinned, [round.plan for round in unread])
        if drafter.captured:
            index, drafted = cast(CapturedDrafter, drafter).queue(rounds, plan)
            unread.append(AtWork(index, plan, drafted, evidence, 0.0))
        elif plan.depth < 1:
            unread.append(AtWork(rounds.queue_plain(), plan, 0, evidence, 0.0))
        elif not unread:
            state.plan = plan
            tree = drafter.propose(state)
            draft_ms = own.lap()
            index = rounds.queue_plain() if len(tree) == 1 else rounds.queue_tree([tree])
            unread.append(AtWork(index, plan, tree, evidence, draft_ms))
        if rounds.num_graphs > graphs:
            atypical.update(round.index for round in unread)
        if len(unread) == 1 and not plan.depth:
            atypical.add(unread[0].index)  # the device waited for it, as it seldom does for a plain one

    try:
        while state.finish_reason is None and not cancelled():
            for _ in range(2 - len(unread)):
                queue()
            rounds.wait(unread[0].index)
            done = unread.popleft()
            room = state.remaining - 1
            commit = read_commit(rounds, cache, state, done)
            root, ended = commit.tokens[-1], state.finish_reason is not None
            depth = rows = None
            if isinstance(done.drafted, int):
                # a draft that found nothing has failed at its first token
                depth = max(*commit.tree.depth, min(done.drafted, room, 1))
                rows = done.plan.budget if done.drafted else 1
            typical = done.index not in atypical
            verify_ms = clock.lap() - done.draft_ms
            yield Played(commit, None, done.draft_ms, verify_ms, done.plan.budget, typical, depth, rows)
    finally:
        # where the answer ended on the host, what rounds queued behind it wrote is accounted for, so that the next
        # request can tell what is left of the cache
        for round in () if ended else unread:
            rounds.wait(round.index)
            tokens, _, _, _ = rounds.reports.read(round.index, state.seq)
            cache.advance(state.seq, [root, *tokens[:-1]] if tokens else [])
            root = tokens[-1] if tokens else root


def read_commit(rounds: Rounds, cache: KVCache, state: State, done: AtWork) -> Commit:
    """What a round that has reported committed, entered into the host's state."""
    tokens, accepted, status, rows = rounds.reports.read(done.index, state.seq)
    if status == NOT_FINITE:
        raise NonFiniteError(f"the target's logits after position {len(state.ids) - 1} are not finite")
    if isinstance(done.drafted, DraftTree):
        tree = done.drafted
    else:  # what would stand behind the answer's last token was not drafted
        depth = min(done.drafted, state.remaining - 1)
        tree = stand_in(state.root, tokens[:accepted], rows, depth, done.evidence)
    cache.advance(state.seq, [state.root, *tokens[:-1]])
    path = path_of(tree, tokens[:accepted])
    overridden: tuple[Overridden, ...] = ()
    if rounds.judge is not None and accepted:
        found = rounds.reports.overrides(done.index, state.seq, accepted)
        overridden = tuple(Overridden(path[1 + place], *numbers) for place, *numbers in found)
    commit = state.commit(tree, path, tokens[-1], overridden)
    assert commit.tokens == tokens and (status != RUNNING) == (state.finish_reason is not None), (
        "host and device disagree"
    )
    return commit


def stand_in(root: int, accepted: list[int], rows: int, depth: int, evidence: int) -> DraftTree:
    """For a tree that the device made, of which only the rows that were kept are known: so many rows, as deep as was
    drafted, and the others beside them. What is not known is the root's token."""
    tokens = [root, *accepted, *[root] * (rows - 1 - len(accepted))]
    deep = max(len(accepted), min(depth, rows - 1))
    return DraftTree(tokens, [*range(-1, deep), *[0] * (rows - 1 - deep)], evidence)


def path_of(tree: DraftTree, tokens: list[int]) -> list[int]:
    """The nodes from the root along these tokens; of twins the first, as the rules have it."""
    path, children = [0], tree.children
    for token in tokens:
        path.append(next(child for child in children[path[-1]] if tree.tokens[child] == token))
    return path
