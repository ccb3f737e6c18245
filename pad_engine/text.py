"""From token ids to text that can be shown while it grows: whole characters only, and nothing is ever taken back."""

from collections.abc import Sequence
from typing import Any

# a character that is not complete yet decodes to this
REPLACEMENT = "�"


class TextStream:
    """Turns committed ids into pieces of text whose concatenation is the decoding of all ids.

    tokenizer: a transformers tokenizer. Special tokens are left out.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.shown = ""
        # text up to `settled` ids is shown; decoding restarts at `anchor`, one step earlier, because a tokenizer may
        # treat the first token of a text differently
        self.anchor = self.settled = 0

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids by themselves."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def push(self, ids: Sequence[int]) -> str:
        """Take new ids; returns the text that is now certain."""
        self.ids += ids
        before = self.decode(self.ids[self.anchor : self.settled])
        after = self.decode(self.ids[self.anchor :])
        if after.endswith(REPLACEMENT) or len(after) <= len(before):
            return ""
        self.anchor, self.settled = self.settled, len(self.ids)
        piece = after[len(before) :]
        self.shown += piece
        return piece

    def flush(self) -> str:
        """What was held back, as the end of the whole decoding."""
        piece = self.decode(self.ids)[len(self.shown) :]
        self.shown += piece
        return piece
