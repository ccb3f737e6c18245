"""The three forms of a prompt, and their token ids."""

from collections.abc import Mapping, Sequence
from typing import Any

from pad_engine.errors import RequestError

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]


def encode(tokenizer: Any, prompt: Prompt, num_tokens: int) -> list[int]:
    """Text is completed as the tokenizer encodes it by default, ids are taken as they are, and messages are written out
    by the model's chat template, which brings its own special tokens."""
    if isinstance(prompt, str):
        ids = list(tokenizer(prompt).input_ids)
    elif prompt and all(isinstance(item, Mapping) for item in prompt):
        if not getattr(tokenizer, "chat_template", None):
            raise RequestError("this model has no chat template", "give the prompt as text")
        text = tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True)
        ids = list(tokenizer(text, add_special_tokens=False).input_ids)
    elif all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
        ids = [item for item in prompt if isinstance(item, int)]
    else:
        raise RequestError(
            f"prompt must be text, a list of token ids or a list of messages, got {type(prompt).__name__}"
        )
    if not ids:
        raise RequestError("the prompt is empty: at least one token is needed to go on from")
    for token in ids:
        if not 0 <= token < num_tokens:
            raise RequestError(f"prompt token id {token} is outside the vocabulary of {num_tokens}")
    return ids
