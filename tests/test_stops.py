"""Where an answer ends: stop texts, stop ids, limits; ids, text, logprobs and usage agree whatever ended it."""

import json
from typing import Any

import pytest
from tiny import EOS, Make, some_ids, tiny_engine

from pad_engine import Engine, SamplingParams
from pad_engine.drafters.scripted import Scripted
from pad_engine.output import Output
from pad_engine.tree import DraftTree

PROMPT = some_ids(6) * 3
# a multi-byte character and a repeated pair are in it
SPOKEN = "abcdefghijabcabd日本語xyzabzz😀!!"


def say(engine: Engine, spoken: str, prompt: list[int] = PROMPT) -> list[int]:
    """Make the target say these bytes, whatever it reads: by position."""
    wanted = list(spoken.encode())
    forward, logits, positions = engine.target.forward, engine.target.logits, []

    def remember(placement: Any, *rest: Any) -> Any:
        positions[:] = placement.positions.tolist()
        return forward(placement, *rest)

    def forced(hidden: Any) -> Any:
        out = logits(hidden)
        for row, position in enumerate(positions):
            out[row, wanted[max(0, min(position + 1 - len(prompt), len(wanted) - 1))]] = 100.0
        return out

    engine.target.forward, engine.target.logits = remember, forced  # type: ignore[method-assign]
    return wanted


def speaker(make_model: Make, drafted: int, spoken: str = SPOKEN, tree: bool = False, budget: int = 64) -> Engine:
    """Drafts `drafted` right tokens each round."""

    def draft(ids: list[int]) -> list[int] | DraftTree:
        ahead = wanted[len(ids) - len(PROMPT) :][:drafted]
        if not tree:
            return ahead
        tokens, parents, node = [ids[-1]], [-1], 0
        for token in ahead:
            tokens += [(token + 1) % 250, token]
            parents += [node, node]
            node = len(tokens) - 1
        return DraftTree(tokens, parents)

    engine = tiny_engine(make_model("llama"), Scripted(draft), budget=budget)
    wanted = say(engine, spoken)
    return engine


@pytest.fixture(scope="module")
def by_drafted(make_model: Make) -> dict[int, Engine]:
    return {k: speaker(make_model, k) for k in range(17)}


def check_agreement(engine: Engine, params: SamplingParams) -> Output:
    """Stream, answer, text, ids, logprobs and usage are all of the same tokens."""
    deltas = list(engine.stream(PROMPT, params))
    out = engine.generate(PROMPT, params)
    assert out.token_ids == [token for delta in deltas for token in delta.token_ids]
    assert out.text == "".join(delta.text for delta in deltas)
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [out.finish_reason]
    assert out.stats.completion_tokens == len(out.token_ids)
    assert out.stats.prompt_tokens == len(PROMPT)
    assert out.stats.accepted_tokens <= out.stats.draft_tokens
    assert out.stats.rounds <= len(out.token_ids)
    assert out.stats.accepted_tokens + out.stats.rounds >= len(out.token_ids)
    if params.logprobs is not None:
        assert out.logprobs is not None
        assert [entry.token_id for entry in out.logprobs] == out.token_ids
        assert all(len(d.token_ids) == len(d.logprobs or []) for d in deltas)
    parsed = json.loads(json.dumps(out.to_dict()))
    assert (parsed["text"], parsed["token_ids"], parsed["finish_reason"]) == (
        out.text,
        out.token_ids,
        out.finish_reason,
    )
    assert parsed["stats"]["completion_tokens"] == len(out.token_ids)
    return out


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (["ab"], ""),
        (["bc"], "a"),
        (["jk"], SPOKEN),
        (["ja"], "abcdefghi"),
        (["abd"], "abcdefghijabc"),
        # the first of several to be complete, not the first of the list
        (["efgh", "fg"], "abcde"),
        (["cdef", "cde", "zzzz"], "ab"),
        (["本"], "abcdefghijabcabd日"),
        (["語x"], "abcdefghijabcabd日本"),
        (["zz"], "abcdefghijabcabd日本語xyzab"),
        (["😀!!"], "abcdefghijabcabd日本語xyzabzz"),
        (["!!?"], SPOKEN),
        (["!!"], "abcdefghijabcabd日本語xyzabzz😀"),
        (SPOKEN, ""),
        (SPOKEN[3:], "abc"),
    ],
    ids=str,
)
def test_stop_texts_for_every_draft_length(by_drafted: dict[int, Engine], stop: Any, expected: str) -> None:
    """C03: K in 0..16; long accepted runs after the stop, and stops that begin in one round and end in the next."""
    params = SamplingParams(len(SPOKEN.encode()), stop=stop, ignore_eos=True, logprobs=1)
    plain = check_agreement(by_drafted[0], params)
    assert (plain.text, plain.finish_reason) == (expected, "length" if expected == SPOKEN else "stop")
    for engine in by_drafted.values():
        out = check_agreement(engine, params)
        assert (out.text, out.token_ids, out.finish_reason) == (plain.text, plain.token_ids, plain.finish_reason)
        assert out.logprobs is not None and plain.logprobs is not None
        assert [e.logprob for e in out.logprobs] == pytest.approx([e.logprob for e in plain.logprobs], abs=1e-3)


def test_two_characters_in_twelve_accepted_tokens(make_model: Make) -> None:
    """C03 as it was written: the 2nd token of a 12-token run completes the stop."""
    engine = speaker(make_model, 12)
    out = check_agreement(engine, SamplingParams(30, stop="ab"))
    assert (out.text, out.token_ids, out.stats.rounds) == ("", list(b"ab"), 1)
    assert out.stats.accepted_tokens == 2
    # first token in one round, second in the next: after thirteen come "cab"
    out = check_agreement(engine, SamplingParams(30, stop="ca"))
    assert (out.text, out.stats.rounds) == ("abcdefghijab", 2)


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("drafted", [0, 1, 5, 16])
@pytest.mark.parametrize(
    ("fields", "count", "reason"),
    [
        ({"stop_token_ids": [ord("c")]}, 3, "stop"),
        ({"stop_token_ids": [ord("z"), ord("j"), 299]}, 10, "stop"),
        ({"stop_token_ids": [ord("c")], "min_tokens": 2}, 3, "stop"),
        ({"stop": "abc", "min_tokens": 4}, 13, "stop"),
        ({"stop": "abc", "min_tokens": 3}, 3, "stop"),
        ({"stop": "abd", "stop_token_ids": [ord("j")]}, 10, "stop"),
        ({"stop": "ij", "stop_token_ids": [ord("j")]}, 10, "stop"),
        ({"stop": "nothing"}, 17, "length"),
        ({"max_tokens": 1}, 1, "length"),
        ({"max_tokens": 13, "stop": "abc", "min_tokens": 4}, 13, "stop"),
        ({"max_tokens": 12, "stop": "abc", "min_tokens": 4}, 12, "length"),
        ({"max_tokens": 10, "stop_token_ids": [ord("j")]}, 10, "stop"),
    ],
    ids=str,
)
def test_every_end(make_model: Make, fields: dict[str, Any], count: int, reason: str, drafted: int, tree: bool) -> None:
    engine = speaker(make_model, drafted, tree=tree)
    out = check_agreement(engine, SamplingParams(**{"max_tokens": 17, "logprobs": 2, **fields}))
    assert (out.token_ids, out.finish_reason) == (list(SPOKEN.encode())[:count], reason)
    text = SPOKEN.encode()[:count].decode(errors="ignore")
    by_text = reason == "stop" and [s for s in [fields.get("stop")] if s and text.endswith(s)]
    assert out.text.rstrip("\ufffd") == (text[: -len(by_text[0])] if by_text else text)


@pytest.mark.parametrize("drafted", [0, 3, 9])
def test_a_stop_id_before_min_tokens_is_not_said(make_model: Make, drafted: int) -> None:
    """The token is forbidden until then, so something else is said in its place, the same with every draft."""
    params = SamplingParams(12, stop_token_ids=[ord("c"), ord("f")], min_tokens=5)
    out = check_agreement(speaker(make_model, drafted), params)
    plain = check_agreement(speaker(make_model, 0), params)
    assert out.token_ids == plain.token_ids
    assert (out.token_ids[:2], out.token_ids[3:], out.finish_reason) == (list(b"ab"), list(b"def"), "stop")
    assert out.token_ids[2] != ord("c")


@pytest.mark.parametrize("drafted", [0, 1, 2, 7, 16])
def test_a_stop_inside_a_token(make_model: Make, drafted: int) -> None:
    """Tokens of several characters: the text ends in the middle of one, which the ids keep."""
    engine = speaker(make_model, drafted, "abc")
    # ids 258 and 259 read "<x258>"
    wanted = [97, 258, 98, 259, 99]
    say_ids(engine, wanted)
    for stop, text, count in (
        ("x2", "a<", 2),
        ("8>b", "a<x25", 3),
        ("a<x258>b<x259>", "", 4),
        ("9>c", "a<x258>b<x25", 5),
    ):
        out = check_agreement(engine, SamplingParams(5, stop=stop, logprobs=0))
        assert (out.text, out.token_ids, out.finish_reason) == (text, wanted[:count], "stop")
    out = check_agreement(engine, SamplingParams(5, stop=["9>cd", "<<"]))
    assert (out.text, out.finish_reason) == ("a<x258>b<x259>c", "length")


def say_ids(engine: Engine, wanted: list[int]) -> None:
    logits, cells = engine.target.logits, engine.target.forward.__closure__
    assert cells is not None
    positions = next(cell.cell_contents for cell in cells if isinstance(cell.cell_contents, list))

    def forced(hidden: Any) -> Any:
        out = logits(hidden)
        for row, position in enumerate(positions):
            out[row, wanted[max(0, min(position + 1 - len(PROMPT), len(wanted) - 1))]] = 200.0
        return out

    engine.target.logits = forced  # type: ignore[method-assign]
    engine.drafter.script = lambda ids: wanted[len(ids) - len(PROMPT) :][:16]  # type: ignore[attr-defined]


@pytest.mark.parametrize("drafted", [0, 2, 5, 16])
def test_cancelled_at_every_round(make_model: Make, drafted: int) -> None:
    """`cancel` and the end of the stream agree with what was shown; what was held back comes with the end."""
    engine = speaker(make_model, drafted)
    rounds = engine.generate(PROMPT, SamplingParams(30, stop="hijk", ignore_eos=True)).stats.rounds
    for stop_after in range(1, rounds):
        stream = engine.stream(PROMPT, SamplingParams(30, stop=["hijk", "本語?"], ignore_eos=True, logprobs=1))
        deltas = [next(stream) for _ in range(stop_after)]
        engine.cancel()
        deltas += list(stream)
        ids = [token for delta in deltas for token in delta.token_ids]
        assert deltas[-1].finish_reason == "cancelled"
        assert deltas[-1].stats is not None and deltas[-1].stats.completion_tokens == len(ids)
        assert "".join(delta.text for delta in deltas) == engine.tokenizer.decode(ids)
        assert sum(len(delta.logprobs or []) for delta in deltas) == len(ids) == stop_after * (drafted + 1)
    assert engine.generate(PROMPT, SamplingParams(5, ignore_eos=True)).text == "abcde"


def test_logprobs_of_a_request_cancelled_before_its_first_round(make_model: Make) -> None:
    engine = speaker(make_model, 2)
    begin = engine.drafter.begin
    engine.drafter.begin = lambda *args: (begin(*args), engine.cancel())[0]  # type: ignore[method-assign]
    out = engine.generate(PROMPT, SamplingParams(5, logprobs=1))
    assert (out.token_ids, out.text, out.finish_reason) == ([], "", "cancelled")
    assert out.logprobs == []


def test_eos_text_is_left_out_and_eos_counts(make_model: Make) -> None:
    engine = speaker(make_model, 4, "ab")
    say_ids(engine, [97, 98, EOS, 99, 100])
    out = check_agreement(engine, SamplingParams(5, logprobs=0))
    assert (out.text, out.token_ids, out.finish_reason) == ("ab", [97, 98, EOS], "stop")
    out = check_agreement(engine, SamplingParams(5, ignore_eos=True, stop="bc"))
    assert (out.text, out.token_ids, out.finish_reason) == ("a", [97, 98, EOS, 99], "stop")
