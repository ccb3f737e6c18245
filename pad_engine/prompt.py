"""The three forms of a prompt, and their token ids. Next to read: chat_template.py."""

from collections.abc import Mapping, Sequence
from typing import Any

from pad_engine.chat_template import Message, chat_ids, check_text
from pad_engine.errors import RequestError

Prompt = str | Sequence[int] | Sequence[Message]


def encode(tokenizer: Any, prompt: Prompt, num_tokens: int) -> list[int]:
    """Text is completed as the tokenizer encodes it by default, ids are taken as they are, and messages are written out
    by the model's chat template, which brings its own special tokens."""
    if isinstance(prompt, str):
        check_text(prompt, "the prompt")
        ids = list(tokenizer(prompt).input_ids)
    elif isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
        raise RequestError(f"prompt must be text, a list of token ids or of messages, got {type(prompt).__name__}")
    elif prompt and all(isinstance(item, Mapping) for item in prompt):
        ids = chat_ids(tokenizer, [item for item in prompt if isinstance(item, Mapping)])
    elif all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
        ids = [item for item in prompt if isinstance(item, int)]
    else:
        raise RequestError(
            "prompt must be text, a list of token ids or a list of messages, got a list of something else"
        )
    if not ids:
        raise RequestError("the prompt is empty: at least one token is needed to go on from")
    for token in ids:
        if not 0 <= token < num_tokens:
            raise RequestError(f"prompt token id {token} is outside the vocabulary of {num_tokens}")
    return ids
