"""The engine: one target, one drafter, one rule, and the round that joins them. Newcomers start here.

    tree   = drafter.propose(state)     what may follow
    record = verify(target, tree)       one pass of the target over all of it
    path   = accept(record, rule)       what stays, and the token after it
    commit = state.commit(path)         tokens, keys and values, finish

Plain decoding is the round with a tree of one node. Next to read: round.py, tree.py, controller.py.
"""

import secrets
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pad_engine.captured import Played, play, serves
from pad_engine.config import SamplingParams
from pad_engine.controller import FEW, Controller
from pad_engine.costs import CostFile
from pad_engine.drafters.drafter import Drafter
from pad_engine.errors import RequestError
from pad_engine.graphs import Rounds
from pad_engine.kv_cache import PREFILL_SCRATCH, prefill_chunk
from pad_engine.models.decoder import Decoder
from pad_engine.models.fused import ROW_PADS, unsupported, unsupported_strict
from pad_engine.output import Delta, Output, Stats, Stopwatch, TokenLogprobs, collect, token_logprobs
from pad_engine.prompt import Prompt, encode
from pad_engine.round import decode_round
from pad_engine.rules.rule import AcceptanceRule
from pad_engine.rules.select import RelaxedRule, bind, rule_for
from pad_engine.state import Commit, State
from pad_engine.text import TextStream
from pad_engine.verify import prefill

SEQ = 0  # the one sequence of a stream
WARM_PROMPT, WARM_TOKENS = 80, 8  # tokens of warm_up's prompt, and of its answers beyond those of its rounds
WARM_ROUNDS = FEW + 2  # of each size at least: the first ones are not measured
# plain rounds before a draft, for each number of rows that may read what they leave unread
WARM_UNREAD = [pad + 1 for pad in ROW_PADS[:-1]]
WARM_TRIAL = 64  # tokens of the answer that shows whether dear drafts pay
OnRound = Callable[[Played], None]


def warm_tokens(budget: int, unread: int) -> int:
    """Tokens of an answer of warm_up. unread: of plain rounds ahead of its drafts."""
    return unread + WARM_ROUNDS * budget + WARM_TOKENS


class Prefix:
    """A handle of what the cache holds, from Engine.prefill."""


class Engine:
    """Generates text for one request at a time, from any thread.

    target: the model. tokenizer: a transformers tokenizer. drafter: see drafters/drafter.py. rule: a rule, or a name
    with options (rules/select.py); "auto" is greedy at temperature 0 and match above. controller: decides how much is
    drafted. max_length: tokens of prompt and answer together, at most. eos_token_ids: any of them ends an answer.
    fused: rounds run on the fused kernels and, on a GPU, as captured graphs; by default where there is one. strict: an
    answer in half precision is that of every strict engine of the same budget, whatever was drafted; fused chains only.
    Each round then costs what the largest does. costs: where the controller's measurements are kept between processes.
    """

    def __init__(
        self,
        target: Decoder,
        tokenizer: Any,
        drafter: Drafter,
        controller: Controller,
        *,
        rule: str | AcceptanceRule | RelaxedRule = "auto",
        max_length: int,
        num_tokens: int,
        eos_token_ids: Sequence[int] = (),
        fused: bool | None = None,
        strict: bool = False,
        costs: CostFile | None = None,
    ) -> None:
        self.target, self.tokenizer, self.drafter, self.controller = target, tokenizer, drafter, controller
        self.max_length, self.num_tokens = max_length, num_tokens
        self.rule = bind(rule, target, num_tokens)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.cache = target.new_cache(capacity=max_length, scratch=max(PREFILL_SCRATCH, controller.max_budget))
        fuses = fused or (fused is None and target.device.type == "cuda")
        if strict and not fuses:
            raise RequestError("strict mode needs fused rounds", "a GPU, or fused=True")
        self.rounds = self._fused_rounds(strict) if fuses else None
        self.costs = costs
        if costs is not None:
            costs.load(controller)
        self.lock = threading.Lock()
        self.serving: int | None = None  # the thread whose request is running
        self.cancelled = threading.Event()
        self.owner: Prefix | None = None  # whose tokens the cache holds

    def _fused_rounds(self, strict: bool) -> Rounds | None:
        """The captured rounds, or None, with a warning, for a model that cannot have them."""
        reason = unsupported(self.target)
        if strict:
            reason = reason or unsupported_strict(self.cache, self.controller.branching, bool(self.drafter.taps))
            if reason:
                raise RequestError(f"strict mode cannot serve this engine: {reason}")
        elif reason:
            warnings.warn(f"this model runs without fused kernels, slower: {reason}", stacklevel=4)
            return None
        override = None if isinstance(self.rule, str) else self.rule.override
        if override is not None and (override.kernel is None or override.either < 1.0):
            override = None  # decided on the host
        budget = self.controller.max_budget
        return Rounds(
            self.target, self.cache, num_tokens=self.num_tokens, max_budget=budget, strict=strict, override=override
        )  # fmt: skip

    @classmethod
    def from_pretrained(cls, model: str | Path, **options: Any) -> "Engine":
        """Load a model by alias, folder, `.gguf` file or hub id. The options are those of loader.load_engine."""
        from pad_engine.loader import load_engine

        return load_engine(model, **options)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        prefix: Prefix | None = None,
        on_round: OnRound | None = None,
    ) -> Output:
        """Answer a prompt: text to complete, token ids, or chat messages. RequestError says what is wrong with it."""
        return collect(self.stream(prompt, params, prefix=prefix, on_round=on_round))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        prefix: Prefix | None = None,
        on_round: OnRound | None = None,
    ) -> Iterator[Delta]:
        """The same, piece by piece, as rounds finish. Closing the iterator cancels the request.

        prefix: a handle of `prefill`; what the prompt has in common with it is not read again. on_round: called with
        each round before its piece is handed out, cut where the answer ends.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, got {params!r}")
        if prefix is not None and not isinstance(prefix, Prefix):
            raise RequestError(f"prefix must be a handle of prefill, got {prefix!r}")
        rule = rule_for(self.rule, params)
        self._check_ids(params)
        if self.serving is None:
            self.cancelled.clear()  # an earlier call of `cancel` had nothing to end
        return self._run(self._encode(prompt), params, rule, prefix, on_round)

    def prefill(self, prompt: Prompt) -> Prefix:
        """Read a prompt ahead of its request. The handle follows the requests that it is given to: each turn of a chat
        that passes it on costs its new tokens only. Any other request in between makes the next one read everything."""
        ids, handle = self._encode(prompt), Prefix()
        with self._serve(handle), torch.inference_mode():
            self.cache.reset(SEQ, len(ids))
            chunk = prefill_chunk(self.target.device)
            prefill(self.target, self.cache, SEQ, ids[:-1], chunk, rounds=self.rounds)
        return handle

    def warm_up(self, prompt: Prompt | None = None) -> None:
        """On a GPU: compile and capture each round that the controller may choose, and measure its cost, by short
        answers. Else that is done in the first request that needs the round, which waits for it: half a minute where
        no kernel is in the cache of compiled ones. Where drafts are dear, an answer more shows whether they pay. Call
        it before requests are served. prompt: one like those to come; by default a few dozen tokens. RequestError as of
        `generate`."""
        if self.rounds is None or self.target.device.type != "cuda":
            return
        own = self.controller
        # a draft at the end of an answer may have any depth
        runs = [(budget, 0) for budget in sorted({*range(1, own.max_depth + 2), *own.budgets})]
        if own.everywhere:  # twice: a round during which something was made is not measured
            runs += 2 * [(own.budgets[0], unread) for unread in WARM_UNREAD]
        longest = max(WARM_TRIAL, *(warm_tokens(*run) for run in runs))
        room = max(1, self.max_length - longest - 1)
        ids = [0] * min(WARM_PROMPT, room) if prompt is None else self._encode(prompt)
        try:
            for budget, unread in runs:
                depth = min(own.max_depth, budget - 1)
                self.controller = Controller(budget, depth, branching=own.branching, fixed=True)
                self.controller.start = unread
                self.controller.verify_cost, self.controller.draft_cost = own.verify_cost, own.draft_cost
                self.controller.read_cost = own.read_cost
                self.generate(ids, SamplingParams(warm_tokens(budget, unread), ignore_eos=True))
        finally:
            self.controller = own
        if own.everywhere:
            self.generate(ids, SamplingParams(WARM_TRIAL, ignore_eos=True))
            own.trial = 0.0  # that was the trial: no request to come pays for another

    def cancel(self) -> None:
        """End the running request after the pass at work; its stream closes with finish_reason "cancelled"."""
        self.cancelled.set()

    def _encode(self, prompt: Prompt) -> list[int]:
        ids = encode(self.tokenizer, prompt, self.num_tokens)
        if len(ids) >= self.max_length:
            raise RequestError(
                f"the prompt has {len(ids)} tokens and leaves no room in a context of {self.max_length}",
                "shorten it, or raise max_length if the model allows",
            )
        return ids

    def _check_ids(self, params: SamplingParams) -> None:
        for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            if any(token >= self.num_tokens for token in ids):
                raise RequestError(f"{name}: token id {max(ids)} is outside the vocabulary of {self.num_tokens}")

    def _begin(self, state: State, prefix: Prefix | None) -> int:
        """Bring drafter, controller and cache to the start of a request; returns how many tokens need no reading."""
        # rotary frequencies that depend on the length would differ from those of a fresh start
        reuse = prefix is not None and prefix is self.owner and not self.target.dynamic
        self.owner = None  # whatever happens, the cache is no longer what a handle promises
        self.drafter.begin(state.ids, reuse)
        self.controller.begin()
        kept = 0
        if reuse:
            kept = self.cache.keep_prefix(SEQ, state.ids[:-1])
        else:
            self.cache.reset(SEQ)
        self.cache.prompt_lengths[SEQ] = len(state.ids)
        return kept

    @contextmanager
    def _serve(self, prefix: Prefix | None) -> Iterator[None]:
        """Wait for other threads' requests, and leave the engine usable however this one ends."""
        if self.serving == threading.get_ident():
            # it would wait for itself
            raise RequestError("this thread has an open stream on this engine", "read it to its end or close it first")
        with self.lock:
            self.serving = threading.get_ident()
            try:
                yield
            finally:
                self.cache.discard(SEQ)
                if self.costs is not None:
                    self.costs.save(self.controller)
                self.owner, self.serving = prefix, None
                self.cancelled.clear()

    @torch.inference_mode()
    def _run(
        self, ids: list[int], params: SamplingParams, rule: AcceptanceRule, prefix: Prefix | None,
        on_round: OnRound | None,
    ) -> Iterator[Delta]:  # fmt: skip
        with self._serve(prefix):
            seed = secrets.randbits(53) if params.seed is None else params.seed
            end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_token_ids)
            state = State(list(ids), len(ids), self.max_length, params, seed, end_ids)
            state.draws_from_q = rule.end.startswith("residual") and not params.greedy
            state.keeps_q = rule.reads_q
            stats, clock = Stats(seed=seed, prompt_tokens=len(ids)), Stopwatch()
            text = TextStream(self.tokenizer, params.stop_texts, params.min_tokens)
            stats.reused_tokens = self._begin(state, prefix)
            chunk = prefill_chunk(self.target.device)
            prefill(self.target, self.cache, SEQ, ids[stats.reused_tokens : -1], chunk, self.cancelled, self.rounds)
            stats.prefill_seconds = clock.lap() / 1000
            nothing = last = Delta("", [], None if params.logprobs is None else [])
            for commit, piece, logprobs in self._rounds(state, rule, text, on_round):
                stats.add(commit)
                stats.decode_seconds += clock.lap() / 1000
                stats.time_to_first_token = stats.time_to_first_token or stats.prefill_seconds + stats.decode_seconds
                last = Delta(piece, commit.tokens, logprobs)
                if state.finish_reason is None:
                    yield last
                    last = nothing
                    clock.lap()  # the reader's own time is not ours
            rest = "" if text.stopped else text.flush()
            if text.stopped and state.finish_reason != "cancelled":
                state.finish_reason = "stop"  # also when the stop text was complete only with the last bytes
            yield replace(last, text=last.text + rest, finish_reason=state.finish_reason, stats=stats)

    def _rounds(
        self, state: State, rule: AcceptanceRule, text: TextStream, on_round: OnRound | None
    ) -> Iterator[tuple[Commit, str, list[TokenLogprobs] | None]]:
        drafter, controller, wanted = self.drafter, self.controller, state.params.logprobs
        # what a rule of the residual kind emits depends on how much was drafted, so a seed fixes that too
        pinned = state.draws_from_q and state.params.seed is not None
        cancelled = self.cancelled.is_set
        if self.rounds is not None and serves(self.rounds, state, rule, drafter):
            played = play(self.rounds, self.cache, state, drafter, controller, pinned, cancelled)
        else:
            played = self._play_here(state, rule, pinned, cancelled)
        for round in played:
            commit = round.commit
            piece, count = text.push(commit.tokens)
            if count is not None:
                commit = state.cut(commit, count)
            costs = round.draft_ms, round.verify_ms, round.budget, round.typical, round.waited, round.depth, round.rows
            controller.observe(commit.tree, commit.accepted, len(commit.tokens), *costs, round.readings)
            drafter.observe(commit)
            if on_round is not None:
                on_round(replace(round, commit=commit))
            logits = round.logits
            yield commit, piece, None if wanted is None or logits is None else token_logprobs(logits, commit, wanted)
        if state.finish_reason is None:
            state.finish_reason = "cancelled"

    def _play_here(
        self, state: State, rule: AcceptanceRule, pinned: bool, cancelled: Callable[[], bool]
    ) -> Iterator[Played]:
        """Rounds that the host decides: on a CPU all of them, on a GPU those that need their logits."""
        drafter = self.drafter
        while state.finish_reason is None and not cancelled():
            clock = Stopwatch()
            state.plan = self.controller.decide(drafter.evidence(state), state.remaining, pinned)
            tree = drafter.propose(state)
            draft_ms = clock.lap()
            taps = [*drafter.taps, *rule.taps]
            commits, record = decode_round(
                self.target, self.cache, [rule], [state], [tree], self.num_tokens, taps, self.rounds
            )
            yield Played(commits[0], record.logits, draft_ms, clock.lap(), state.plan.budget)
