"""The three forms of a prompt, and their token ids."""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from pad_engine.errors import RequestError

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]


def encode(tokenizer: Any, prompt: Prompt, num_tokens: int) -> list[int]:
    """Text is completed as the tokenizer encodes it by default, ids are taken as they are, and messages are written out
    by the model's chat template, which brings its own special tokens."""
    if isinstance(prompt, str):
        ids = encode_text(tokenizer, prompt, special=True)
    elif isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
        raise RequestError(f"prompt must be text, a list of token ids or of messages, got {type(prompt).__name__}")
    elif prompt and all(isinstance(item, Mapping) for item in prompt):
        if not getattr(tokenizer, "chat_template", None):
            raise RequestError("this model has no chat template", "give the prompt as text")
        for message in prompt:
            if not all(isinstance(message.get(key), str) for key in ("role", "content")):  # type: ignore[union-attr]
                raise RequestError(f"a message needs the texts role and content, got {message!r}")
        try:
            text = tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise RequestError(f"the model's chat template refuses these messages: {error}") from error
        ids = encode_text(tokenizer, text, special=False)
    elif all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
        ids = [item for item in prompt if isinstance(item, int)]
    else:
        raise RequestError("prompt must be text, a list of token ids or of messages, got a list of something else")
    if not ids:
        raise RequestError("the prompt is empty: at least one token is needed to go on from")
    for token in ids:
        if not 0 <= token < num_tokens:
            raise RequestError(f"prompt token id {token} is outside the vocabulary of {num_tokens}")
    return ids


def encode_text(tokenizer: Any, text: str, special: bool) -> list[int]:
    """The ids of a text. special: with the tokens that the tokenizer puts around a text by default."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the prompt is not valid Unicode text: {error}") from error
    return list(tokenizer(text, add_special_tokens=special).input_ids)
