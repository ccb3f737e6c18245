"""A request's rounds on the device: each is queued before the one before it is read, where its draft lets it.

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
from pad_engine.tree import UNKNOWN, DraftTree


@dataclass(frozen=True)
class Played:
    """One round: what it committed, the raw logits fp32 `[N, V]` of its tree where they were kept, and what it cost.
    A draft on the device is part of its round. budget: what was planned for it. typical: False where a graph was made
    meanwhile, and for a request's first round. waited: the device had nothing to do before this plain round, as the
    host had drafted the one before it. depth, rows: as planned, of a draft on the device, whose tree shows only what
    was found. readings: as of RoundPlan."""

    commit: Commit
    logits: Tensor | None
    draft_ms: float
    verify_ms: float
    budget: int
    typical: bool = True
    waited: bool = False
    depth: int | None = None
    rows: int | None = None
    readings: int = 0


@dataclass(frozen=True)
class AtWork:
    """A round that was queued and not read. drafted: its tree, or the depth of one that the device makes. evidence: the
    drafter's class when it was planned. waited: as of Played, for any round that was queued behind none."""

    index: int
    plan: RoundPlan
    drafted: DraftTree | int
    evidence: int
    waited: bool
    draft_ms: float = 0.0


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


class Ahead:
    """The rounds of a request that were queued and not read, at most two.

    A plain round, and one whose draft the device makes, is queued before the one before it is read: of what is at work
    the host then knows no more than that it emits a token. A draft of the host's own needs all tokens, and its round
    waits for them.
    """

    def __init__(self, rounds: Rounds, state: State, drafter: Drafter, controller: Controller, pinned: bool) -> None:
        self.rounds, self.state, self.drafter = rounds, state, drafter
        self.controller, self.pinned = controller, pinned
        self.unread: deque[AtWork] = deque()
        self.atypical: set[int] = set()

    def queue(self) -> None:
        """Queue a round behind those at work, unless they end the answer or its draft has to wait for them."""
        rounds, state, drafter, unread = self.rounds, self.state, self.drafter, self.unread
        room = state.remaining - len(unread)
        if room < 1:
            return
        clock, graphs, evidence = Stopwatch(), rounds.num_graphs, drafter.evidence(state)
        captured = cast(CapturedDrafter, drafter) if drafter.captured else None
        readings = captured.readings if captured is not None else 0
        plan = self.controller.decide(evidence, room, self.pinned, [round.plan for round in unread], readings)
        waited = not unread
        if captured is not None:
            index, depth = captured.queue(rounds, plan)
            unread.append(AtWork(index, plan, depth, evidence, waited))
        elif plan.depth < 1:
            unread.append(AtWork(rounds.queue_plain(), plan, 0, evidence, waited))
        elif not unread:
            state.plan = plan
            tree = drafter.propose(state)
            draft_ms = clock.lap()
            index = rounds.queue_plain() if len(tree) == 1 else rounds.queue_tree([tree])
            unread.append(AtWork(index, plan, tree, evidence, waited, draft_ms))
        if rounds.num_graphs > graphs:
            self.atypical.update(round.index for round in unread)

    def settle(self, cache: KVCache, root: int) -> None:
        """Where the answer ended on the host: account for what the rounds queued behind its last one wrote, so that the
        next request can tell what is left of the cache. root: the last token that was read."""
        for round in self.unread:
            self.rounds.wait(round.index)
            tokens, _, _, _ = self.rounds.reports.read(round.index, self.state.seq)
            cache.advance(self.state.seq, [root, *tokens[:-1]] if tokens else [])
            root = tokens[-1] if tokens else root


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
    ahead = Ahead(rounds, state, drafter, controller, pinned)
    clock, root, ended = Stopwatch(), state.root, False
    try:
        while state.finish_reason is None and not cancelled():
            for _ in range(2 - len(ahead.unread)):
                ahead.queue()
            rounds.wait(ahead.unread[0].index)
            done, room = ahead.unread.popleft(), state.remaining - 1
            commit = read_commit(rounds, cache, state, done)
            root, ended = commit.tokens[-1], state.finish_reason is not None
            depth = rows = None
            if isinstance(done.drafted, int):
                # a draft that found nothing has failed at its first token
                depth = max(*commit.tree.depth, min(done.drafted, room, 1))
                rows = done.plan.budget if done.drafted else 1
            plain = len(commit.tree) == 1 and not depth
            first, waited = plain and state.round == 1, plain and done.waited
            typical = done.index not in ahead.atypical and not first
            verify_ms = clock.lap() - done.draft_ms
            costs = done.draft_ms, verify_ms, done.plan.budget, typical, waited, depth, rows, done.plan.readings
            yield Played(commit, None, *costs)
    finally:
        if not ended:
            ahead.settle(cache, root)


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
    drafted, and the others beside them. What is not known is UNKNOWN."""
    tokens = [root, *accepted, *[UNKNOWN] * (rows - 1 - len(accepted))]
    deep = max(len(accepted), min(depth, rows - 1))
    return DraftTree(tokens, [*range(-1, deep), *[0] * (rows - 1 - deep)], evidence)


def path_of(tree: DraftTree, tokens: list[int]) -> list[int]:
    """The nodes from the root along these tokens; of twins the first, as the rules have it."""
    path, children = [0], tree.children
    for token in tokens:
        path.append(next(child for child in children[path[-1]] if tree.tokens[child] == token))
    return path
