"""From token ids to text that can be shown while it grows: whole characters only, and nothing is ever taken back.

Text that may be the beginning of a stop text is held back until it is sure that it is not. Next to read: engine.py.
"""

from collections.abc import Sequence
from typing import Any

# a character that is not complete yet decodes to this
REPLACEMENT = "\ufffd"


class TextStream:
    """Turns committed ids into pieces of text whose concatenation is the decoding of all ids, up to a stop text.

    tokenizer: a transformers tokenizer; special tokens are left out. stop: texts that end the answer. min_tokens: stop
    texts that are complete before so many tokens do not count.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self.tokenizer, self.stop, self.min_tokens = tokenizer, stop, min_tokens
        self.ids: list[int] = []
        self.text = ""  # decoded for good
        self.shown = 0  # characters of it that were handed out
        self.stopped = False
        # `text` covers ids up to `settled`; decoding restarts at `anchor`, one step earlier, because a tokenizer may
        # treat the first token of a text differently
        self.anchor = self.settled = 0

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids by themselves."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def push(self, tokens: Sequence[int]) -> tuple[str, int | None]:
        """Take new tokens. Returns the text that is now certain, and how many of the tokens belong to the answer when a
        stop text was completed, else None."""
        for count, token in enumerate(tokens, start=1):
            self.ids.append(token)
            before = len(self.text)
            self.text += self.settle()
            if (end := self.stop_start(before)) is not None:
                self.text, self.stopped = self.text[:end], True
                return self.show(len(self.text)), count
        return self.show(len(self.text) - self.held_back()), None

    def settle(self) -> str:
        """The text of the ids that are not decoded yet, or nothing while it ends inside a character."""
        before = self.decode(self.ids[self.anchor : self.settled])
        after = self.decode(self.ids[self.anchor :])
        if after.endswith(REPLACEMENT) or len(after) <= len(before):
            return ""
        self.anchor, self.settled = self.settled, len(self.ids)
        return after[len(before) :]

    def stop_start(self, before: int) -> int | None:
        """Where the earliest stop text begins that ends beyond the first `before` characters."""
        if len(self.ids) < self.min_tokens:
            return None
        places = [self.text.find(stop, max(0, before - len(stop) + 1)) for stop in self.stop]
        return min((place for place in places if place >= 0), default=None)

    def held_back(self) -> int:
        """Length of the longest end of the text with which a stop text may begin."""
        longest = 0
        for stop in self.stop:
            for length in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def show(self, end: int) -> str:
        """Hand out the text up to a character."""
        piece = self.text[self.shown : end]
        self.shown = max(self.shown, end)
        return piece

    def flush(self) -> str:
        """What was held back, when the answer has ended without a stop text."""
        before = len(self.text)
        self.text += self.decode(self.ids[self.anchor :])[len(self.decode(self.ids[self.anchor : self.settled])) :]
        self.anchor = self.settled = len(self.ids)
        if (end := self.stop_start(before)) is not None:
            self.text, self.stopped = self.text[:end], True
        return self.show(len(self.text))
