"""Streamed text over byte-level and sentencepiece-like tokenizers: the pieces are the text, and none is taken back."""

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import Make, make_tokenizer, some_ids, tiny_engine

from pad_engine import SamplingParams
from pad_engine.drafters.scripted import Scripted
from pad_engine.text import REPLACEMENT, TextStream

WORDS = [
    "the",
    "The",
    "re",
    "at",
    "ing",
    "ab",
    "bc",
    "日",
    "本",
    "é",
    "ส",
    "วั",
    ".",
    ",",
    "\n",
    "a",
    "b",
    "c",
    "x",
    "STOP",
    "ST",
    "OP",
]
TEXTS = [
    "the cat, ab abc. The ring",
    "good 😀 day 👩‍👩‍👧‍👦 and 🎉🎉!",
    "สวัสดีครับ ผมชื่อ สมชาย",
    "naïve 日本語  two  spaces \n\n tab\tend ",
    " leading and trailing ",
]


@cache
def sentencepiece(strip: bool) -> Any:
    """Words with U+2581 for the space before them, and every byte as <0xNN>; as Llama 2's (strip: the first space goes)
    or with the Metaspace decoder."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += [p for word in WORDS for p in (word, "▁" + word)]
    pieces += sorted({c for text in TEXTS for c in text if c.isascii() and c not in " \t\n"} - set(pieces))
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges: list[tuple[str, str]] = []
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if strip:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "bytes": cache(make_tokenizer),
    "llama-2": lambda: sentencepiece(True),
    "metaspace": lambda: sentencepiece(False),
}
KINDS = [name for name in TOKENIZERS if name != "bytes"]


def whole(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def stream(
    tokenizer: Any, ids: Sequence[int], cuts: Sequence[int], stop: Sequence[str] = (), min_tokens: int = 0
) -> tuple[list[str], int]:
    """The pieces, and how many ids the answer has; blocks end at `cuts`."""
    text, pieces, last = TextStream(tokenizer, stop, min_tokens), [], 0
    for cut in [*cuts, len(ids)]:
        piece, count = text.push(ids[last:cut])
        pieces.append(piece)
        if count is not None:
            return pieces, last + count
        last = cut
    return [*pieces, text.flush()], len(ids)


@pytest.mark.parametrize("block", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_join_to_the_text(name: str, text: str, block: int) -> None:
    """C17."""
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer(text, add_special_tokens=False).input_ids
    pieces, _ = stream(tokenizer, ids, range(block, len(ids), block))
    assert "".join(pieces) == whole(tokenizer, ids)
    assert "".join(pieces).strip() == text.strip()
    assert REPLACEMENT not in "".join(pieces)


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_any_pieces_in_any_order(name: str, data: st.DataObject) -> None:
    """Words, spaces, specials and whole characters of bytes; a model may join them as no encoder would."""
    tokenizer = TOKENIZERS[name]()
    unit = st.one_of(
        st.sampled_from(["▁", *WORDS, *("▁" + word for word in WORDS)]).map(
            lambda piece: list(tokenizer.convert_tokens_to_ids([piece]))
        ),
        st.sampled_from("é語😀ส").map(lambda c: [2 + byte for byte in c.encode()]),
        st.just([1]),
    )
    ids = [token for part in data.draw(st.lists(unit, max_size=12)) for token in part]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    pieces, _ = stream(tokenizer, ids, cuts)
    assert "".join(pieces) == whole(tokenizer, ids)
    assert REPLACEMENT not in "".join(pieces)


@pytest.mark.parametrize("name", KINDS)
@given(ids=st.lists(st.integers(0, 257), max_size=14), data=st.data())
@settings(max_examples=100, deadline=None)
def test_any_bytes_at_all(name: str, ids: list[int], data: st.DataObject) -> None:
    """Broken UTF-8: byte fallback would turn shown characters into U+FFFD when a broken one follows them,
    which no stream can do. The text is the same for all blocks; without a broken byte it is the whole decoding."""
    tokenizer = TOKENIZERS[name]()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    pieces, _ = stream(tokenizer, ids, cuts)
    assert "".join(pieces) == "".join(stream(tokenizer, ids, range(1, len(ids)))[0])
    if REPLACEMENT not in whole(tokenizer, ids):
        assert "".join(pieces) == whole(tokenizer, ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("missing", [1, 2, 3])
@pytest.mark.parametrize("before", ["", "ok", "é", "日本"])
def test_an_end_inside_a_character(name: str, missing: int, before: str) -> None:
    """What was complete stays, and what is not is U+FFFD; in one block and token by token alike."""
    tokenizer, first = TOKENIZERS[name](), 0 if name == "bytes" else 2
    ids = [first + byte for byte in f"{before}😀".encode()][:-missing]
    once, by_one = (stream(tokenizer, ids, cuts)[0] for cuts in ([], range(1, len(ids))))
    assert "".join(once) == "".join(by_one)
    assert "".join(once).rstrip(REPLACEMENT) == before
    assert "".join(once).endswith(REPLACEMENT)
    assert not any(REPLACEMENT in piece for piece in by_one[:-1])


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_character_behind_a_broken_one(name: str) -> None:
    tokenizer, first = TOKENIZERS[name](), 0 if name == "bytes" else 2
    b = tokenizer.convert_tokens_to_ids("b")
    ids = [*(first + byte for byte in "aé".encode() + b"\xe4"), b, *(first + byte for byte in "日".encode())]
    pieces, _ = stream(tokenizer, ids, range(1, len(ids)))
    assert "".join(pieces).replace(REPLACEMENT, "") == "aéb日"


def expect(tokenizer: Any, ids: Sequence[int], stop: Sequence[str], min_tokens: int = 0) -> tuple[str, int]:
    """By decoding each beginning of the ids anew: the answer ends with the first token that completes a stop text.

    A beginning that ends inside a character says nothing: byte fallback then breaks characters before it too.
    """
    shorter = ""
    for count in range(1, len(ids) + 1):
        text = whole(tokenizer, ids[:count])
        if text.endswith(REPLACEMENT):
            continue
        ends = [i for s in stop for i in range(len(text)) if text.startswith(s, i) and i + len(s) > len(shorter)]
        if ends and count >= min_tokens:
            return text[: min(ends)], count
        shorter = text
    return whole(tokenizer, ids), len(ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_stop_texts_at_any_cut(name: str, data: st.DataObject) -> None:
    """C03. Overlapping, repeated, multi-byte stops; inside a token; never is more shown than the text."""
    tokenizer = TOKENIZERS[name]()
    text = data.draw(st.text(alphabet="abc é😀", max_size=16))
    stop = data.draw(st.lists(st.text(alphabet="abc é😀", min_size=1, max_size=4), max_size=3))
    min_tokens = data.draw(st.integers(0, 12))
    if data.draw(st.booleans()):
        # longer tokens, with stops inside
        text = text.replace("a", "STOP").replace("c", "The")
        stop = [s.replace("a", "TO").replace("c", "he") for s in stop]
    ids = tokenizer(text, add_special_tokens=False).input_ids
    expected, count = expect(tokenizer, ids, stop, min_tokens)
    for cuts in ([], range(1, len(ids)), sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))):
        pieces, ended = stream(tokenizer, ids, cuts, stop, min_tokens)
        assert ("".join(pieces), ended) == (expected, count)
        shown = ""
        for piece in pieces:
            shown += piece
            assert expected.startswith(shown)


def test_partial_stops_are_held_back_and_let_go() -> None:
    text = TextStream(make_tokenizer(), ["</s>", "\n\n"])
    push = lambda s: text.push(list(s.encode()))[0]  # noqa: E731
    assert [push(s) for s in ("a<", "/", "b", "\n", "c\n", "</s", "x")] == ["a", "", "</b", "", "\nc", "\n", "</sx"]
    assert text.push(list(b"y\n\nz")) == ("y", 3)
    assert text.stopped
    held = TextStream(make_tokenizer(), ["end."])
    assert held.push(list(b"the en")) == ("the ", None)
    assert held.flush() == "en"
    # as much is held as can begin a stop, and no more
    aab = TextStream(make_tokenizer(), ["aab"])
    assert [aab.push([97])[0] for _ in range(4)] == ["", "", "a", "a"]
    assert aab.push([98]) == ("", 1)


@pytest.mark.parametrize("budget", [1, 4, 8])
@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_an_engines_stream_equals_its_answer(make_model: Make, budget: int, accepted: int) -> None:
    """C17: bytes of characters that blocks of any length end in."""
    wanted = list("hé 😀👩‍👩‍👧‍👦 ส日!".encode())
    prompt = some_ids(5)
    engine = tiny_engine(make_model("llama"), Scripted(lambda ids: []), budget=budget)
    force(engine, prompt, wanted)
    full = prompt + wanted
    engine.drafter.script = lambda ids: [t if i < accepted else (t + 1) % 250 for i, t in enumerate(full[len(ids) :])]  # type: ignore[attr-defined]
    for count in (1, 2, 5, 6, 9, 20, len(wanted)):
        deltas = list(engine.stream(prompt, SamplingParams(count, ignore_eos=True)))
        assert "".join(delta.text for delta in deltas) == whole(engine.tokenizer, wanted[:count])
        assert not any(REPLACEMENT in delta.text for delta in deltas[:-1])
        assert [token for delta in deltas for token in delta.token_ids] == wanted[:count]
        assert deltas[-1].stats is not None and deltas[-1].stats.completion_tokens == count


def force(engine: Any, prompt: list[int], wanted: list[int]) -> None:
    """Make the target say these tokens, whatever it reads: by position."""
    forward, logits = engine.target.forward, engine.target.logits
    engine.target = object.__new__(type(engine.target))
    engine.target.__dict__.update(make_forced(forward, logits, len(prompt), wanted))


def make_forced(forward: Any, logits: Any, first: int, wanted: list[int]) -> dict[str, Any]:
    fields = dict(forward.__self__.__dict__)
    last: dict[str, Any] = {}

    def remember(placement: Any, *rest: Any) -> Any:
        last["positions"] = placement.positions
        return forward(placement, *rest)

    def forced(hidden: Any) -> Any:
        out = logits(hidden)
        for row, position in enumerate(last["positions"].tolist()):
            out[row, wanted[min(position + 1 - first, len(wanted) - 1)]] = 100.0
        return out

    return fields | {"forward": remember, "logits": forced}


@pytest.mark.parametrize("seed", range(3))
def test_long_garbage_is_not_slow(seed: int) -> None:
    """Thousands of bytes that never make a character: each push decodes what is not settled yet."""
    import time

    rng, text = random.Random(seed), TextStream(make_tokenizer())
    start = time.perf_counter()
    for _ in range(1500):
        text.push([rng.randrange(128, 192)])
    text.flush()
    assert time.perf_counter() - start < 10
