"""Streamed text: joined pieces equal the whole decoding, and no character is shown before it is complete."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import EOS, make_tokenizer

from pad_engine.text import REPLACEMENT, TextStream

TOKENIZER = make_tokenizer()
FAMILY_EMOJI = "👩‍👩‍👧‍👦"
TEXTS = {
    "emoji": "good 😀 day 🎉!",
    "joined-family": f"we {FAMILY_EMOJI} {FAMILY_EMOJI}.",
    "thai": "สวัสดีครับ ผมชื่อ สมชาย",
    "mixed": "naïve 日本語 \u0301e\u0301 \ttab\n\nend ",
}


def stream(ids: list[int], cuts: list[int]) -> list[str]:
    """The pieces of ids that come in blocks which end at `cuts`, and of the flush."""
    text, pieces, last = TextStream(TOKENIZER), [], 0
    for cut in [*cuts, len(ids)]:
        pieces.append(text.push(ids[last:cut])[0])
        last = cut
    return [*pieces, text.flush()]


@pytest.mark.parametrize("block", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("name", TEXTS)
def test_pieces_join_to_the_text(name: str, block: int) -> None:
    ids = list(TEXTS[name].encode())
    pieces = stream(ids, list(range(block, len(ids), block)))
    assert "".join(pieces) == TEXTS[name]
    assert not any(REPLACEMENT in piece for piece in pieces)


@pytest.mark.parametrize("missing", [1, 2, 3])
@pytest.mark.parametrize("block", [1, 4])
def test_a_cut_inside_a_character_ends_as_the_whole_decoding_does(missing: int, block: int) -> None:
    ids = list("ok 😀".encode())[:-missing]
    pieces = stream(ids, list(range(block, len(ids), block)))
    assert "".join(pieces) == TOKENIZER.decode(ids)
    assert "".join(pieces).endswith(REPLACEMENT)
    assert not any(REPLACEMENT in piece for piece in pieces[:-1])


# any bytes at all, broken UTF-8 among them, special tokens between
@given(st.lists(st.integers(0, 260), max_size=40), st.data())
@settings(max_examples=300, deadline=None)
def test_any_ids_in_any_blocks(ids: list[int], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=10)))
    assert "".join(stream(ids, cuts)) == TOKENIZER.decode(ids, skip_special_tokens=True)


@given(st.text(max_size=20), st.data())
@settings(max_examples=200, deadline=None)
def test_any_text_in_any_blocks_without_replacement_characters(text: str, data: st.DataObject) -> None:
    ids = list(text.encode())
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=10)))
    pieces = stream(ids, cuts)
    assert "".join(pieces) == text
    assert sum(piece.count(REPLACEMENT) for piece in pieces) == text.count(REPLACEMENT)


def test_special_tokens_are_left_out_and_hold_nothing_back() -> None:
    text = TextStream(TOKENIZER)
    assert [text.push([token])[0] for token in (97, EOS, 98, EOS)] == ["a", "", "b", ""]
    assert text.flush() == ""


def test_whole_characters_are_shown_at_once() -> None:
    text = TextStream(TOKENIZER)
    assert text.push(list(b"hello"))[0] == "hello"
    ids = list(" 😀".encode())
    assert text.push(ids[:2])[0] == " "
    assert text.push(ids[2:])[0] == "😀"
    assert text.flush() == ""


@pytest.mark.parametrize("block", [1, 2, 3])
def test_a_tokenizer_that_drops_the_space_before_the_first_word(block: int) -> None:
    """As those of Llama 2 and Gemma do; a piece that is decoded alone would lose its space. Bytes are single tokens."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = ["▁the", "▁sky", "▁", "s", *(f"<0x{byte:02X}>" for byte in range(256))]
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    ids = [0, 1, 3, 2, *(4 + byte for byte in "😀".encode()), 0, 1, 1, 3]
    text = TextStream(tokenizer)
    pieces = [text.push(ids[i : i + block])[0] for i in range(0, len(ids), block)]
    assert "".join([*pieces, text.flush()]) == "the skys 😀 the sky skys"
    assert not any(REPLACEMENT in piece for piece in pieces)
