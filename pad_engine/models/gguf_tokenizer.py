"""GGUF metadata as tokenizer.json and tokenizer_config.json.

transformers converts GGUF tokenizers too, but it takes every byte-level one for GPT-2's (SmolLM2 splits digits first),
and the conversion changed between the versions that we support.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pad_engine.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "\u2581"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_BYTE_LEVEL = ("gpt-2", "smollm", "llama-bpe", "llama-v3", "llama3", "qwen2")


def build_tokenizer(metadata: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """A `tokenizers.Tokenizer` and tokenizer_config.json from GGUF metadata; ids equal the GGUF's.

    Raises ModelError for a tokenizer model or a pre-tokenizer that is not known.
    """
    kind = metadata["tokenizer.ggml.model"]
    if kind == "gpt2":
        tokenizer = _byte_level(metadata)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata)
    else:
        raise ModelError(f"the GGUF tokenizer {kind!r} is not supported", "supported: gpt2, llama")
    _add_tokens(tokenizer, metadata)
    _add_bos(tokenizer, metadata)
    return tokenizer, _tokenizer_config(metadata)


def _vocabulary(metadata: dict[str, Any]) -> list[tuple[str, int]]:
    """(text, type) by id. Rows that only pad the matrix are no tokens, so they are left out at the end."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    count = len(tokens)
    while count and types[count - 1] == UNUSED and re.fullmatch(r"\[PAD\d+\]", tokens[count - 1]):
        count -= 1
    return list(zip(tokens[:count], types[:count], strict=True))


def _byte_level(metadata: dict[str, Any]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if pre not in _BYTE_LEVEL:
        raise ModelError(f"the GGUF pre-tokenizer {pre!r} is not supported", f"supported: {', '.join(_BYTE_LEVEL)}")
    vocab = {text: i for i, (text, _) in enumerate(_vocabulary(metadata))}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    whole = pre not in ("gpt-2", "smollm", "qwen2")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=whole))
    pattern = _QWEN2 if pre == "qwen2" else _LLAMA3
    if pre == "gpt-2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    elif pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    else:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        raw = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, raw])
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: dict[str, Any]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    entries = _vocabulary(metadata)
    vocab = {text: i for i, (text, _) in enumerate(entries)}
    scores = metadata["tokenizer.ggml.scores"]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    model = models.BPE(
        vocab=vocab,
        merges=_merges([(text, scores[i]) for i, (text, kind) in enumerate(entries) if kind == NORMAL], vocab),
        unk_token=None if unknown is None else entries[unknown][0],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", SPACE)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges(pieces: list[tuple[str, float]], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a piece, the best piece first: what SentencePiece's scores mean as BPE merges."""
    ranked = []
    normal = {text for text, _ in pieces}
    for text, score in pieces:
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in normal and right in normal:
                ranked.append((-score, vocab[left], vocab[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _add_tokens(tokenizer: Tokenizer, metadata: dict[str, Any]) -> None:
    from tokenizers import AddedToken

    entries = _vocabulary(metadata)
    special = [text for text, kind in entries if kind in (CONTROL, UNKNOWN)]
    plain = [text for text, kind in entries if kind == USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])


def _adds_bos(metadata: dict[str, Any]) -> bool:
    # llama.cpp's defaults where the key is absent
    default = metadata["tokenizer.ggml.model"] == "llama" or "llama" in metadata.get("tokenizer.ggml.pre", "")
    return bool(metadata.get("tokenizer.ggml.add_bos_token", default))


def _add_bos(tokenizer: Tokenizer, metadata: dict[str, Any]) -> None:
    from tokenizers import processors

    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if bos is None or not _adds_bos(metadata):
        return
    text = metadata["tokenizer.ggml.tokens"][bos]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[text, "$A"], pair=[text, "$A", f"{text}:1", "$B:1"], special_tokens=[(text, int(bos))]
    )


def _tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    arch = metadata["general.architecture"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(metadata[f"{arch}.context_length"]),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{name}_token"] = metadata["tokenizer.ggml.tokens"][token]
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config
