"""Which tokens a draft model may propose, if not all: an LM head of their rows alone costs so much less to read.

The target verifies over its whole vocabulary, so a token that is missing here costs acceptance and nothing else: it
comes as the target's own (FR-Spec, Zhao et al. 2025, arXiv 2502.14856, which takes the most frequent tokens).
Next to read: Decoder.with_head (models/decoder.py).
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pad_engine.config import MAX_TOKENS, is_token, take_int, take_text
from pad_engine.errors import RequestError
from pad_engine.models.decoder import Decoder
from pad_engine.models.memory import Estimate, check

WHAT = "drafter draft-model"
BLOCK = 2**20  # characters that are encoded at once


def take_vocab(values: dict[str, str]) -> Sequence[int] | None:
    """Remove `vocab` of a drafter's values: the ids that it stands for, ascending, or None where it is not there. A
    number N is the first N ids: a tokenizer's merges are in the order of how often they were made, so these are most of
    a text."""
    if "vocab" not in values:
        return None
    text = take_text(values, "vocab", WHAT)
    if re.fullmatch(r"[+-]?\d+", text):
        return range(take_int({"vocab": text}, "vocab", 0, WHAT, high=MAX_TOKENS))
    return read_vocab(Path(text).expanduser())


def read_vocab(path: Path) -> list[int]:
    """The ids of a JSON list of token ids, ascending, whatever their order. RequestError for anything else than a list
    of at least one id, none of them twice."""
    try:
        ids = json.loads(path.read_bytes())
    except OSError as error:
        raise RequestError(f"{WHAT}: vocab {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise RequestError(f"{WHAT}: vocab {path} must be a JSON list of token ids: {error}") from error
    wrong = [value for value in ids if not is_token(value)] if isinstance(ids, list) else [ids]
    if wrong or not ids:
        found = f"{wrong[0]!r:.40}" if wrong else "an empty list"
        raise RequestError(f"{WHAT}: vocab {path} must be a JSON list of token ids, got {found}")
    token, times = Counter(ids).most_common(1)[0]
    if times > 1:
        raise RequestError(f"{WHAT}: vocab {path} has token id {token} {times} times, expected each once")
    return sorted(ids)


def limit_head(decoder: Decoder, ids: Sequence[int], num_tokens: int) -> Decoder:
    """The draft model with an LM head of these tokens alone. num_tokens: ids below this mean the same to both models; a
    range is cut there, any other id from there on is a RequestError. ModelError where memory lacks for the rows."""
    if isinstance(ids, range):
        ids = ids[:num_tokens]
    if ids[-1] >= num_tokens:
        raise RequestError(
            f"{WHAT}: vocab has token id {ids[-1]}, expected ids below {num_tokens}, which both models have",
            "make the list with the target's tokenizer",
        )
    # at most: the first rows may do without a copy
    copied = len(ids) * decoder.config.hidden_size * (decoder.quantised or decoder.dtype).itemsize
    check(Estimate(copied, 0, 0), decoder.device)
    return decoder.with_head(ids)


def most_frequent(tokenizer: Any, texts: Iterable[Path], size: int) -> tuple[list[int], float]:
    """The `size` tokens that are most of these UTF-8 texts, ascending, and their share of the texts' tokens. Of tokens
    that come as often the lower ids are taken, so those that never come are filled up in the order of merges."""
    known = max(tokenizer.get_vocab().values()) + 1
    if not 1 <= size <= known:
        raise RequestError(f"size must be in [1, {known}], the tokens of the tokenizer, got {size}")
    counts: Counter[int] = Counter()
    for path in texts:
        try:
            with path.open(encoding="utf-8") as file:
                while block := file.read(BLOCK):
                    counts.update(tokenizer(block, add_special_tokens=False, verbose=False).input_ids)
        except OSError as error:
            raise RequestError(f"{path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise RequestError(f"{path} is not UTF-8 text: {error}") from error
    if not counts:
        raise RequestError("the texts are empty, so no token can be counted")
    ids = sorted(range(known), key=lambda token: (-counts[token], token))[:size]
    return sorted(ids), sum(counts[token] for token in ids) / counts.total()
