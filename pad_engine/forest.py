"""Many requests at once, for labels, calibration and evaluation: the engine's own round over a forest, one tree a
sequence. A sequence that ends hands its place to the next request.

Sequences are independent: in fp32 an answer is the one that engine.py gives to its request alone, with a drafter
"draft-model:depth=..." that always drafts its whole budget. What counts here is the tokens of all requests a second,
not the latency of one. So greedy requests for the same answer under several rules, one added right behind the other,
share a sequence: it is drafted and verified once for all of them, as long as their rules keep the same tokens. Those
who part go on in a sequence of their own, which begins as a copy.

Next to read: kv_forest.py, drafters/draft_forest.py.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from pad_engine.drafters.draft_forest import DraftForest
from pad_engine.errors import NonFiniteError, RequestError
from pad_engine.forest_request import ForestAnswer, ForestRequest, Running, start
from pad_engine.kv_cache import prefill_chunk
from pad_engine.kv_forest import commit_forest
from pad_engine.loader import load_draft
from pad_engine.models.decoder import Decoder
from pad_engine.models.loader import LoadedModel, load_model, memory_need
from pad_engine.models.memory import Estimate, check
from pad_engine.round import commit_each
from pad_engine.rules.rule import AcceptanceRule
from pad_engine.rules.select import RelaxedRule, bind
from pad_engine.state import Commit, State
from pad_engine.tree import DraftTree
from pad_engine.verify import read_prompts, verify

MAX_DEPTH = 63  # a tree has 64 nodes at most
SCRATCH = MAX_DEPTH + 1


@dataclass(frozen=True)
class Pair:
    """A target, and the draft model that shares its first `shared_tokens` ids, if there is one."""

    target: LoadedModel
    draft: Decoder | None = None
    shared_tokens: int = 0


def make_pair(model: str | Path, draft_model: str | Path | None = None, **options: Any) -> Pair:
    """Load a pair. draft_model: as of loader.make_engine. options: those of load_model."""
    target = load_model(model, **options)
    if draft_model is None:
        return Pair(target)
    draft, shared = load_draft(draft_model, target, bool(options.get("accept_terms")))
    return Pair(target, draft, min(shared, target.num_tokens))


class Forest:
    """Decodes up to `batch` requests at a time. rule: as of Engine. depth: tokens that the draft model drafts a round,
    0 for none. max_length: tokens of prompt and answer together at most; by default what the target was loaded for. The
    cache has room for as many in each of its `batch` sequences.

    After an error of a step it is of no use.
    """

    def __init__(
        self,
        pair: Pair,
        *,
        rule: str | AcceptanceRule | RelaxedRule = "auto",
        depth: int = 0,
        batch: int = 64,
        max_length: int | None = None,
    ) -> None:
        target = pair.target.decoder
        if not 0 <= depth <= MAX_DEPTH or batch < 1:
            raise RequestError(f"depth must be in [0, {MAX_DEPTH}] and batch at least 1, got {depth} and {batch}")
        if depth and pair.draft is None:
            raise RequestError(
                f"depth {depth} needs a draft model, and the pair has none", "make_pair(..., draft_model=)"
            )
        self.max_length = target.max_length if max_length is None else max_length
        if not 2 <= self.max_length <= target.max_length:
            raise RequestError(f"max_length must be in [2, {target.max_length}], got {self.max_length}")
        self.pair, self.target, self.num_tokens = pair, target, pair.target.num_tokens
        self.rule = bind(rule, target, self.num_tokens)
        self.chunk = prefill_chunk(target.device)
        one = memory_need(target.config, self.max_length, target.device, target.dtype).kv_cache
        check(Estimate(0, batch * one, 0), target.device)
        self.cache = target.new_cache(num_seqs=batch, capacity=self.max_length, scratch=SCRATCH)
        self.draft = self._draft_forest(depth, batch)
        # else what was read of a prompt is not what a longer one begins with
        self.shares = not target.dynamic and (self.draft is None or not self.draft.decoder.dynamic)
        self.free = deque(range(batch))  # places, the longest unused first: the others may hold a prompt's beginning
        # those who share a sequence
        self.waiting: list[list[Running]] = []
        self.running: list[list[Running]] = []

    def _draft_forest(self, depth: int, batch: int) -> DraftForest | None:
        draft = self.pair.draft
        if draft is None or not depth:
            return None
        capacity = min(self.max_length, draft.max_length)
        return DraftForest(
            draft, num_seqs=batch, num_tokens=self.pair.shared_tokens, capacity=capacity, depth=depth, scratch=SCRATCH,
            chunk=self.chunk,
        )  # fmt: skip

    @property
    def room(self) -> int:
        """How many more sequences can be begun now; who has parted from others comes before new requests."""
        return max(0, len(self.free) - len(self.waiting))

    def can_take(self, request: ForestRequest) -> bool:
        """Whether there is room for a request, be it beside the last one."""
        return self.room > 0 or self._joins(request)

    @property
    def busy(self) -> bool:
        """Whether requests are at work."""
        return bool(self.waiting or self.running)

    def add(self, request: ForestRequest) -> None:
        """Take a request; the next step begins it. RequestError names what is wrong with it, and its key."""
        joins = self._joins(request)
        if not joins and not self.room:
            raise ValueError("the forest is full: step until it has room")
        one = start(request, self.pair.target, self.rule if request.rule is None else request.rule, self.max_length)
        if joins:
            self.waiting[-1].append(one)
        else:
            self.waiting.append([one])

    def _joins(self, request: ForestRequest) -> bool:
        """Whether a request can share the sequence of the last one that waits: it asks for the same, and nothing is
        drawn."""
        if not (self.shares and self.waiting and request.params.greedy):
            return False
        last = self.waiting[-1][0]
        same = (request.prompt, request.params) == (last.request.prompt, last.request.params)
        return same and last.state.round == 0

    @torch.inference_mode()
    def step(self) -> list[ForestAnswer]:
        """One round of all requests; returns the answers that it has finished."""
        self._begin()
        trees = self._propose()
        done: list[ForestAnswer] = []
        kept: list[tuple[State, Commit]] = []
        running: list[list[Running]] = []
        apart: list[list[Running]] = []
        for alike, commits in zip(self.running, self._commits(trees), strict=True):
            for one, commit in zip(alike, commits, strict=True):
                one.add(commit)
            done += [one.answer() for one in alike if one.state.finish_reason is not None]
            parts = parted(alike, commits)
            kept.append((alike[0].state, parts[0][0] if parts else commits[0]))
            if parts:
                running.append(parts[0][1])  # most stay where they are
            else:
                self.free.append(alike[0].state.seq)
            apart += [members for _, members in parts[1:]]
        commit_forest(self.cache, [(state.seq, commit.path) for state, commit in kept])
        if self.draft is not None:
            self.draft.observe(*zip(*kept, strict=True))
        self.running, self.waiting = running, [*apart, *self.waiting]
        return done

    def _begin(self) -> None:
        """Read what new sequences hold, as far as there are places."""
        count = min(len(self.free), len(self.waiting))
        if not count:
            return
        begun, self.waiting = self.waiting[:count], self.waiting[count:]
        for alike in begun:
            seq, keeps_q = self.free.popleft(), any(one.state.keeps_q for one in alike)
            for one in alike:  # whoever leads
                one.state.seq, one.state.keeps_q = seq, keeps_q
        texts = {alike[0].state.seq: list(alike[0].state.ids) for alike in begun}
        read_prompts(self.target, self.cache, texts, self.chunk)
        if self.draft is not None:
            self.draft.begin(texts)
        # in the order of their places, which spares the attention a copy while all of them are taken
        self.running = sorted([*self.running, *begun], key=lambda alike: alike[0].state.seq)

    def _propose(self) -> list[DraftTree]:
        """A tree for each sequence."""
        states = [alike[0].state for alike in self.running]
        if self.draft is None:
            return [DraftTree.chain([state.root]) for state in states]
        return self.draft.propose(states)

    def _commits(self, trees: Sequence[DraftTree]) -> list[list[Commit]]:
        """One pass over the trees of all sequences, and what it adds to each that shares one."""
        leaders = [alike[0] for alike in self.running]
        places = [place for place, alike in enumerate(self.running) for _ in alike]
        rules, states = zip(*((one.rule, one.state) for alike in self.running for one in alike), strict=True)
        taps = sorted({layer for rule in rules for layer in rule.taps})
        try:
            record = verify(self.target, self.cache, [one.state for one in leaders], trees, self.num_tokens, taps)
            commits = iter(commit_each(record, rules, states, trees, places))
        except NonFiniteError as error:
            keys = {one.state.seq: one.request.key for one in leaders}
            raise NonFiniteError(f"request {keys[error.seq]!r}: {error}", seq=error.seq) from error
        return [list(islice(commits, len(alike))) for alike in self.running]


def parted(alike: Sequence[Running], commits: Sequence[Commit]) -> list[tuple[Commit, list[Running]]]:
    """Those of a sequence's requests that go on, by what they kept; the most first. commits: of each."""
    parts: dict[tuple[int, ...], tuple[Commit, list[Running]]] = {}
    for one, commit in zip(alike, commits, strict=True):
        if one.state.finish_reason is None:
            parts.setdefault(tuple(commit.tokens), (commit, []))[1].append(one)
    return sorted(parts.values(), key=lambda part: -len(part[1]))


def decode_forest(
    pair: Pair,
    requests: Iterable[ForestRequest],
    *,
    rule: str | AcceptanceRule | RelaxedRule = "auto",
    depth: int = 0,
    batch: int = 64,
    max_length: int | None = None,
) -> Iterator[ForestAnswer]:
    """Answers to requests, as they finish. Requests are taken from the iterable when a place is free. The other
    arguments are those of Forest."""
    forest, waiting = Forest(pair, rule=rule, depth=depth, batch=batch, max_length=max_length), iter(requests)
    following = next(waiting, None)
    while True:
        while following is not None and forest.can_take(following):
            forest.add(following)
            following = next(waiting, None)
        if not forest.busy:
            return
        yield from forest.step()
