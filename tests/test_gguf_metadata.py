"""GGUF metadata: tokenizers against SentencePiece's own algorithm, and the keys of config.json."""

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from pad_engine.errors import ModelError
from pad_engine.models.gguf_config import build_config
from pad_engine.models.gguf_tokenizer import build_tokenizer


def spm_reference(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's own algorithm: merge the neighbours that make the piece of the best score, leftmost at ties."""
    pieces = list(text)
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in scores]
        if not pairs:
            return pieces
        i = min(pairs)[1]
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_scores_become_merges(prefix: bool) -> None:
    words = ["▁", "a", "b", "c", "ab", "bc", "▁a", "abc", "▁abc", "ca", "cab"]
    scores = {word: -float(rank) for rank, word in enumerate(["bc", "ab", "▁a", "ca", "abc", "cab", "▁abc"])}
    scores |= {word: -100.0 - i for i, word in enumerate("▁abc")}
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{i:02X}>" for i in range(256)], "  ", *words]
    types = [2, 3, 3, *[6] * 256, 4, *[1] * len(words)]
    metadata = {
        "general.architecture": "llama",
        "llama.context_length": 64,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [scores.get(token, 0.0) for token in tokens],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefix,
    }
    tokenizer, config = build_tokenizer(metadata)
    rng = np.random.default_rng(0)
    for _ in range(200):
        text = " ".join("".join(rng.choice(list("abc"), rng.integers(1, 9))) for _ in range(3))
        encoded = tokenizer.encode(text)
        assert encoded.tokens[0] == "<s>"
        assert encoded.tokens[1:] == spm_reference(("▁" if prefix else "") + text.replace(" ", "▁"), scores)
        assert tokenizer.decode(encoded.ids) == text
    assert tokenizer.encode("aé", add_special_tokens=False).tokens[-2:] == ["<0xC3>", "<0xA9>"]
    assert tokenizer.encode("a  b", add_special_tokens=False).tokens.count("  ") == 1
    assert config["bos_token"] == "<s>" and "chat_template" not in config


def test_padding_rows_are_no_tokens_and_other_tokenizers_are_refused() -> None:
    tokens, types, merges = ["<|end|>", "a", "b", "ab"], [3, 1, 1, 1], ["a b"]
    metadata = {
        "general.architecture": "qwen2",
        "qwen2.context_length": 64,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*tokens, "[PAD300]", "[PAD301]"],
        "tokenizer.ggml.token_type": [*types, 5, 5],
        "tokenizer.ggml.merges": merges,
    }
    tokenizer, _ = build_tokenizer(metadata)
    assert tokenizer.get_vocab_size() == len(tokens)
    with pytest.raises(ModelError, match="'viking' is not supported"):
        build_tokenizer(metadata | {"tokenizer.ggml.pre": "viking"})
    with pytest.raises(ModelError, match="'bert' is not supported"):
        build_tokenizer(metadata | {"tokenizer.ggml.model": "bert"})


def test_gemma_and_yarn_metadata_reach_the_config() -> None:
    base = {
        "block_count": 8,
        "context_length": 64,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.layer_norm_rms_epsilon": float(np.float32(1e-6)),
        "rope.scaling.factor": 4.0,
    }
    shapes = {"token_embd.weight": (300, 64)}

    def config(arch: str, **more: Any) -> dict[str, Any]:
        keys = base | {key.replace("__", "."): value for key, value in more.items()}
        metadata = {f"{arch}.{key}": value for key, value in keys.items()}
        return build_config(metadata | {"general.architecture": arch, "tokenizer.ggml.tokens": []}, shapes, None)

    gemma = config("gemma3", attention__key_length=32, attention__sliding_window=16, rope__scaling__type="linear")
    assert gemma["rms_norm_eps"] == 1e-6 and gemma["num_key_value_heads"] == 4 and gemma["head_dim"] == 32
    assert gemma["rope_scaling"] == {"rope_type": "linear", "factor": 4.0} and gemma["rope_local_base_freq"] == 10000.0
    assert [i for i, kind in enumerate(gemma["layer_types"]) if kind == "full_attention"] == [5]
    yarn = config("llama", rope__scaling__type="yarn", rope__scaling__original_context_length=32)
    assert yarn["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    with pytest.raises(ModelError, match="'longrope' is not supported"):
        config("llama", rope__scaling__type="longrope")
    assert json.loads(json.dumps(gemma)) == gemma
