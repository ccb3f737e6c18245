"""The engine: one target, one drafter, one rule, and the round that joins them. Newcomers start here.

    tree   = drafter.propose(state)     what may follow
    record = verify(target, tree)       one pass of the target over all of it
    path   = accept(record, rule)       what stays, and the token after it
    commit = state.commit(path)         tokens, keys and values, finish

Plain decoding is the round with a tree of one node. Next to read: tree.py, verify.py, controller.py.
"""

import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pad_engine.config import SamplingParams
from pad_engine.controller import Controller
from pad_engine.drafters.drafter import Drafter
from pad_engine.errors import RequestError
from pad_engine.kv_cache import KVCache
from pad_engine.models.decoder import Decoder
from pad_engine.output import Delta, Output, Stats, Stopwatch
from pad_engine.prompt import Prompt, encode
from pad_engine.rules.rule import AcceptanceRule
from pad_engine.rules.select import rule_for
from pad_engine.state import Commit, State
from pad_engine.text import TextStream
from pad_engine.tree import DraftTree
from pad_engine.verify import accept, prefill, verify

PREFILL_CHUNK = 512


def decode_round(
    target: Decoder,
    cache: KVCache,
    rule: AcceptanceRule,
    states: Sequence[State],
    trees: Sequence[DraftTree],
    num_tokens: int,
    taps: Sequence[int] = (),
) -> list[Commit]:
    """Verify a forest, one tree a sequence, and commit what each accepted."""
    record = verify(target, cache, states, trees, num_tokens, taps)
    commits = []
    for state, tree, (path, end_token) in zip(states, trees, accept(record, rule), strict=True):
        commit = state.commit(tree, path, end_token)
        cache.commit(state.seq, commit.path)
        commits.append(commit)
    return commits


class Engine:
    """Generates text for one request at a time, from any thread.

    target: the model. tokenizer: a transformers tokenizer. drafter: see drafters/drafter.py. rule: a rule, or "auto"
    for greedy at temperature 0 and match above. controller: decides how much is drafted. max_length: tokens of prompt
    and answer together, at most. eos_token_ids: any of them ends an answer.
    """

    def __init__(
        self,
        target: Decoder,
        tokenizer: Any,
        drafter: Drafter,
        controller: Controller,
        *,
        rule: str | AcceptanceRule = "auto",
        max_length: int,
        num_tokens: int,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self.target, self.tokenizer, self.drafter, self.controller = target, tokenizer, drafter, controller
        self.rule, self.max_length, self.num_tokens = rule, max_length, num_tokens
        self.eos_token_ids = frozenset(eos_token_ids)
        self.cache = target.new_cache(capacity=max_length, scratch=max(PREFILL_CHUNK, controller.max_budget))
        self.lock = threading.Lock()
        self.serving: int | None = None  # the thread whose request is running
        self.cancelled = threading.Event()

    @classmethod
    def from_pretrained(cls, model: str | Path, **options: Any) -> "Engine":
        """Load a model by alias, folder, `.gguf` file or hub id. The options are those of models.loader.load_engine."""
        from pad_engine.models.loader import load_engine

        return load_engine(model, **options)

    def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> Output:
        """Answer a prompt: text to complete, token ids, or chat messages. RequestError says what is wrong with it."""
        text, token_ids = "", []
        for delta in self.stream(prompt, params):
            text += delta.text
            token_ids += delta.token_ids
        assert delta.finish_reason is not None and delta.stats is not None
        return Output(text, token_ids, delta.finish_reason, delta.stats)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """The same, piece by piece, as rounds finish. Closing the iterator cancels the request."""
        params = params or SamplingParams()
        rule = rule_for(self.rule, params)
        ids = encode(self.tokenizer, prompt, self.num_tokens)
        if len(ids) >= self.max_length:
            raise RequestError(
                f"the prompt has {len(ids)} tokens and leaves no room in a context of {self.max_length}",
                "shorten it, or raise max_length if the model allows",
            )
        return self._run(ids, params, rule)

    def cancel(self) -> None:
        """End the running request after its round; its stream closes with finish_reason "cancelled"."""
        self.cancelled.set()

    @contextmanager
    def _serve(self) -> Iterator[None]:
        """Wait for other threads' requests. A thread that asks again inside its own stream would wait for ever."""
        with self.lock:
            self.serving = threading.get_ident()
            try:
                yield
            finally:
                self.serving = None

    @torch.inference_mode()
    def _run(self, ids: list[int], params: SamplingParams, rule: AcceptanceRule) -> Iterator[Delta]:
        if self.serving == threading.get_ident():
            raise RequestError("this thread has an open stream on this engine", "read it to its end or close it first")
        with self._serve():
            self.cancelled.clear()
            seed = secrets.randbits(53) if params.seed is None else params.seed
            state = State(list(ids), len(ids), self.max_length, params, seed, self.eos_token_ids)
            stats, text, clock = Stats(seed=seed, prompt_tokens=len(ids)), TextStream(self.tokenizer), Stopwatch()
            self.drafter.begin(ids)
            self.controller.begin()
            self.cache.reset(state.seq, len(ids))
            prefill(self.target, self.cache, state.seq, ids[:-1], PREFILL_CHUNK)
            stats.prefill_seconds = clock.lap() / 1000
            last: list[int] = []
            for commit in self._rounds(state, rule):
                stats.add(commit)
                stats.decode_seconds += clock.lap() / 1000
                stats.time_to_first_token = stats.time_to_first_token or stats.prefill_seconds + stats.decode_seconds
                if state.finish_reason is None:
                    yield Delta(text.push(commit.tokens), commit.tokens)
                    clock.lap()  # the reader's own time is not ours
                else:
                    last = commit.tokens
            yield Delta(text.push(last) + text.flush(), last, state.finish_reason, stats)

    def _rounds(self, state: State, rule: AcceptanceRule) -> Iterator[Commit]:
        drafter, controller = self.drafter, self.controller
        while state.finish_reason is None:
            if self.cancelled.is_set():
                state.finish_reason = "cancelled"
                return
            clock = Stopwatch()
            state.plan = controller.decide(drafter.evidence(state), state.remaining)
            tree = drafter.propose(state)
            draft_ms = clock.lap()
            commit = decode_round(self.target, self.cache, rule, [state], [tree], self.num_tokens, drafter.taps)[0]
            controller.observe(tree, commit.accepted, len(commit.tokens), draft_ms, clock.lap())
            drafter.observe(commit)
            yield commit
