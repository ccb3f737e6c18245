"""A chat without its terminal: messages, replies, and what of the cache the next turn uses again."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pad_engine.config import SamplingParams
from pad_engine.errors import RequestError
from pad_engine.files import write_json
from pad_engine.serving.reply import answer, figures

if TYPE_CHECKING:
    from pad_engine.engine import Engine, Prefix
    from pad_engine.output import Output


class Session:
    """One conversation. messages: user and assistant in turns, as the next prompt holds them. outputs: of the replies.
    system: the system message, or "" for none. model: its name, for the record."""

    def __init__(self, engine: "Engine", params: SamplingParams, system: str = "", model: str = "") -> None:
        self.engine, self.params, self.system, self.model = engine, params, system, model
        self.messages: list[dict[str, str]] = []
        self.outputs: list[Output] = []
        self.prefix = self.read_ahead()

    def read_ahead(self) -> "Prefix":
        """The handle that every turn passes on; the system message is read before anybody has asked."""
        if self.system:
            try:
                return self.engine.prefill(self.prompt())
            except RequestError:
                pass  # some templates take no system message by itself; what else is wrong is said in the first turn
        return self.engine.prefill([0])  # one token: nothing is read

    def prompt(self, *more: dict[str, str]) -> list[dict[str, str]]:
        """All messages, and more of them."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.messages, *more]

    def ask(self, text: str, show: Callable[[str], None] | None) -> tuple["Output", bool]:
        """One turn; returns the reply and whether Ctrl-C has cut it. A reply that was cut before it began is not kept,
        and neither is its question."""
        from pad_engine.prompt import encode

        question = {"role": "user", "content": text}
        ids = encode(self.engine.tokenizer, self.prompt(question), self.engine.num_tokens)
        if len(ids) >= self.engine.max_length:
            raise RequestError(
                f"with this message the chat has {len(ids)} tokens, and a context of {self.engine.max_length} has no "
                "room for a reply",
                "/undo takes back the last turn; --max-length sets the context",
            )
        out, interrupted = answer(self.engine, ids, self.params, show, self.prefix)
        if out.token_ids:
            self.messages += [question, {"role": "assistant", "content": out.text}]
            self.outputs.append(out)
        return out, interrupted

    def undo(self) -> str | None:
        """Take back the last turn; returns its question, or None when there is no turn."""
        if not self.outputs:
            return None
        self.outputs.pop()
        *self.messages, question, _ = self.messages
        return question["content"]

    def stats_lines(self) -> list[str]:
        """The last reply and the whole chat in figures."""
        if not self.outputs:
            return ["no reply yet"]
        last, all_stats = self.outputs[-1].stats, [out.stats for out in self.outputs]
        tokens, seconds = sum(s.completion_tokens for s in all_stats), sum(s.decode_seconds for s in all_stats)
        prompt, reused = sum(s.prompt_tokens for s in all_stats), sum(s.reused_tokens for s in all_stats)
        rate = tokens / seconds if seconds else 0.0
        return [
            f"last reply: {figures(last)}, {self.outputs[-1].finish_reason}",
            f"its prompt: {last.prompt_tokens} tokens, {last.reused_tokens} of them in the cache already, "
            f"{last.prefill_seconds:.2f} s for the rest; seed {last.seed}",
            f"{len(all_stats)} replies: {tokens} tokens, {rate:.1f} tokens/s; prompts of {prompt} tokens, {reused} of "
            "them in the cache already",
        ]

    def to_dict(self) -> dict[str, Any]:
        """What `/save` writes."""
        replies = [{"finish_reason": out.finish_reason, "stats": out.stats.to_dict()} for out in self.outputs]
        return {"model": self.model, "messages": self.prompt(), "replies": replies}

    def save(self, path: Path, overwrite: bool = False) -> None:
        """Write the chat as JSON, whole or not at all."""
        if not overwrite and os.path.lexists(path):
            raise RequestError(f"{path} exists", "/save! overwrites it")
        write_json(path, self.to_dict())
