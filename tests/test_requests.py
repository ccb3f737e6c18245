"""Where an answer ends, what a request may ask, seeds, and an engine that stays usable whatever a request did."""

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import BOS, EOS, Make, Oracle, make_tiny_model, make_tokenizer, some_ids, tiny_engine

from pad_engine import Engine, SamplingParams
from pad_engine.drafters.scripted import Scripted
from pad_engine.errors import RequestError

REPEATED = some_ids(8, 5) * 5
DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {"drafter": "none"},
    "ngram": {"drafter": "ngram:min=1", "budget": 8},
    "ngram-tree": {"drafter": "ngram:min=1", "trees": "best-first"},
    "self": {"drafter": "draft-model", "draft_model": "self:layers=0,1,2", "budget": 9},
}


def right(full: list[int], count: int) -> Scripted:
    return Scripted(lambda ids: full[len(ids) : len(ids) + count])


@pytest.fixture(scope="module")
def plain_ids(make_model: Make) -> list[int]:
    ids = tiny_engine(make_model("mistral")).generate(REPEATED, SamplingParams(30, ignore_eos=True)).token_ids
    # the end-of-sequence tests take one of these as the end, so none may come earlier
    assert len(set(ids[:8])) == 8
    return ids


@pytest.mark.parametrize("others", [(), (299,)], ids=["one-id", "two-ids"])
@pytest.mark.parametrize("place", [0, 2, 5, 6], ids=["draft-1", "draft-3", "draft-6", "bonus"])
def test_eos_inside_an_accepted_run(make_model: Make, plain_ids: list[int], place: int, others: tuple[int]) -> None:
    """C01: six drafted tokens, all right; the end stands at one of them, or behind them."""
    engine = tiny_engine(make_model("mistral"), right(REPEATED + plain_ids, 6), budget=7)
    engine.eos_token_ids = frozenset((plain_ids[place], *others))
    deltas = list(engine.stream(REPEATED, SamplingParams(30)))
    ids = [token for delta in deltas for token in delta.token_ids]
    assert (
        ids == plain_ids[: place + 1] == Oracle(make_model("mistral")).greedy(REPEATED, 30, [plain_ids[place], *others])
    )
    assert [delta.finish_reason for delta in deltas] == ["stop"]
    assert "".join(delta.text for delta in deltas) == engine.tokenizer.decode(ids, skip_special_tokens=True)
    stats = deltas[-1].stats
    assert stats is not None
    assert (stats.completion_tokens, stats.accepted_tokens, stats.rounds) == (place + 1, min(place + 1, 6), 1)
    assert engine.generate(REPEATED, SamplingParams(30, ignore_eos=True)).token_ids == plain_ids


def test_eos_is_the_union_of_all_that_the_model_says(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, eos_token_id=[7, 9])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 11]}))
    assert tiny_engine(folder).eos_token_ids == {7, 9, 11, EOS}
    (folder / "generation_config.json").unlink()
    assert tiny_engine(folder).eos_token_ids == {7, 9, EOS}


@pytest.mark.parametrize("count", [1, 2, 3, 9])
@pytest.mark.parametrize("name", DRAFTERS)
def test_exactly_max_tokens(make_model: Make, plain_ids: list[int], name: str, count: int) -> None:
    """C02."""
    out = tiny_engine(make_model("mistral"), **DRAFTERS[name]).generate(
        REPEATED, SamplingParams(count, ignore_eos=True)
    )
    assert (out.token_ids, out.finish_reason) == (plain_ids[:count], "length")
    if count == 1:
        assert out.stats.draft_tokens == 0


@pytest.mark.parametrize("prompt", [50, 57, 62, 63])
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_context_is_filled_exactly(make_model: Make, name: str, prompt: int) -> None:
    """C07: 64 tokens of prompt and answer, the last of which is never read."""
    ids = (some_ids(8, 3) * 9)[:prompt]
    engine = tiny_engine(make_model("llama"), max_length=64, **DRAFTERS[name])
    out = engine.generate(ids, SamplingParams(10_000, ignore_eos=True))
    assert (len(out.token_ids), out.finish_reason) == (64 - prompt, "length")
    assert out.token_ids == Oracle(make_model("llama")).greedy(ids, 64 - prompt)


@pytest.mark.parametrize("prompt", [64, 65, 200])
def test_a_prompt_without_room_is_refused(make_model: Make, prompt: int) -> None:
    engine = tiny_engine(make_model("llama"), max_length=64)
    with pytest.raises(RequestError, match=f"the prompt has {prompt} tokens.*context of 64"):
        engine.generate([1] * prompt)


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([5, 300], "300"),
        ([-1], "-1"),
        (None, "NoneType"),
        (5, "int"),
        (b"text", "bytes"),
        ({"role": "user", "content": "x"}, "dict"),
        ([1, "a"], "list"),
        ([[1, 2]], "list"),
        ([True], "list"),
        ([1.5], "list"),
        ([{"content": "no role"}], "role"),
        ([{"role": "user"}], "content"),
        ([{"role": "user", "content": "x"}, 5], "list"),
        ("broken \ud800", "prompt"),
    ],
    ids=repr,
)
def test_a_bad_prompt_gets_one_clear_error(make_model: Make, prompt: Any, named: str) -> None:
    engine = tiny_engine(make_model("llama"))
    with pytest.raises(RequestError, match=named) as refused:
        engine.generate(prompt, SamplingParams(1))
    assert "\n" not in str(refused.value)


def test_a_template_that_raises_is_a_request_error(make_model: Make) -> None:
    engine = tiny_engine(make_model("llama"))
    engine.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RequestError, match="roles must alternate"):
        engine.generate([{"role": "user", "content": "x"}])
    engine.tokenizer.chat_template = None
    with pytest.raises(RequestError, match="chat template"):
        engine.generate([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", v) for v in (-1, -1e-9, float("nan"), float("inf"), "1", None, 1e31, 10**400)]
    + [("max_tokens", v) for v in (0, -1, 1.5, "4", None, True)]
    + [("seed", v) for v in (-1, 2**64, 1.5, "1", True)],
    ids=lambda value: str(value)[:16],
)
def test_a_bad_parameter_gets_one_clear_error(make_model: Make, field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field):
        tiny_engine(make_model("llama")).generate([1], SamplingParams(**{"max_tokens": 1, field: value}))


@pytest.mark.parametrize("temperature", [1e-8, 1e-6, 1e-5, 1e-4])
def test_a_tiny_temperature_is_greedy(make_model: Make, plain_ids: list[int], temperature: float) -> None:
    """C09."""
    engine = tiny_engine(make_model("mistral"), "ngram")
    assert engine.generate(REPEATED, SamplingParams(30, temperature, ignore_eos=True)).token_ids == plain_ids


def test_three_forms_of_a_prompt(make_model: Make) -> None:
    engine, params = tiny_engine(make_model("llama"), "ngram"), SamplingParams(12)
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "é"},
        {"role": "user", "content": "?"},
    ]
    text = "<user>hi\n<assistant>é\n<user>?\n<assistant>"
    by_ids = engine.generate(list(text.encode()), params)
    for prompt in (text, messages, tuple(text.encode())):
        out = engine.generate(prompt, params)
        assert out.token_ids == by_ids.token_ids
        assert out.stats.prompt_tokens == len(text.encode())


def test_bos_is_never_doubled(make_model: Make) -> None:
    """C18: the tokenizer adds one to a completion; the template of a chat writes its own."""
    engine = tiny_engine(make_model("llama"))
    engine.tokenizer = make_tokenizer(add_bos=True)
    engine.tokenizer.chat_template = "{{ bos_token }}" + engine.tokenizer.chat_template
    seen: list[list[int]] = []
    engine.drafter = Scripted(lambda ids: seen.append(ids) or [])  # type: ignore[func-returns-value]
    engine.controller = tiny_engine(make_model("llama"), "ngram").controller
    for prompt, expected in (("ab", [BOS, 97, 98]), ([{"role": "u", "content": "a"}], [BOS, *b"<u>a\n<assistant>"])):
        assert engine.generate(prompt, SamplingParams(2)).stats.prompt_tokens == len(expected)
        assert seen.pop(0) == expected
        seen.clear()


def test_seeds(make_model: Make) -> None:
    """C11."""
    engine = tiny_engine(make_model("llama"), "ngram")
    params = SamplingParams(30, 0.8, 11)
    first = engine.generate("abc", params).token_ids
    for other in (SamplingParams(9), SamplingParams(9, 1.0, 5), SamplingParams(20, 0.3)):
        engine.generate("unrelated", other)
    assert engine.generate("abc", params).token_ids == first
    assert tiny_engine(make_model("llama")).generate("abc", params).token_ids == first
    different = {tuple(engine.generate("abc", SamplingParams(30, 0.8, seed)).token_ids) for seed in range(5)}
    assert len(different) == 5
    unseeded = [engine.generate("abc", SamplingParams(30, 0.8)) for _ in range(4)]
    assert len({tuple(out.token_ids) for out in unseeded}) == 4
    # what an unseeded run was can be had again
    again = SamplingParams(30, 0.8, unseeded[0].stats.seed)
    assert engine.generate("abc", again).token_ids == unseeded[0].token_ids
    for seed in (0, 2**53, 2**64 - 1):
        assert len(engine.generate("abc", SamplingParams(3, 0.8, seed, True)).token_ids) == 3


def stop_by_cancel(engine: Engine) -> None:
    stream = engine.stream(REPEATED, SamplingParams(200, ignore_eos=True))
    got = [next(stream), next(stream)]
    engine.cancel()
    rest = list(stream)
    assert rest[-1].finish_reason == "cancelled"
    text = "".join(delta.text for delta in got + rest)
    assert text == engine.tokenizer.decode([t for delta in got + rest for t in delta.token_ids])


def stop_by_close(engine: Engine) -> None:
    stream = engine.stream(REPEATED, SamplingParams(200, ignore_eos=True))
    next(stream)
    stream.close()  # type: ignore[attr-defined]


def stop_by_leaving(engine: Engine) -> None:
    for _ in engine.stream(REPEATED, SamplingParams(200, ignore_eos=True)):
        break


def stop_by_drafter(engine: Engine) -> None:
    propose, calls = engine.drafter.propose, iter(range(3))

    def broken(state: Any) -> Any:
        if next(calls, None) is None:
            raise ZeroDivisionError("drafter")
        return propose(state)

    engine.drafter.propose = broken  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        engine.generate(REPEATED, SamplingParams(200, ignore_eos=True))
    engine.drafter.propose = propose  # type: ignore[method-assign]


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("stop", [stop_by_cancel, stop_by_close, stop_by_leaving, stop_by_drafter])
def test_the_engine_goes_on_after(
    make_model: Make, plain_ids: list[int], name: str, stop: Callable[[Engine], None]
) -> None:
    engine = tiny_engine(make_model("mistral"), **DRAFTERS[name])
    stop(engine)
    assert engine.generate(REPEATED, SamplingParams(30, ignore_eos=True)).token_ids == plain_ids


def test_two_threads_take_turns(make_model: Make, plain_ids: list[int]) -> None:
    engine, answers = tiny_engine(make_model("mistral"), "ngram"), []
    run = lambda: answers.append(engine.generate(REPEATED, SamplingParams(30, ignore_eos=True)).token_ids)  # noqa: E731
    threads = [threading.Thread(target=run) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join(30) for thread in threads]
    assert answers == [plain_ids] * 4


def test_a_second_request_inside_an_open_stream_does_not_hang(make_model: Make) -> None:
    """The same thread holds the engine and asks for it: it can wait for ever, or be told."""
    engine, told = tiny_engine(make_model("llama")), threading.Event()

    def nested() -> None:
        stream = engine.stream([1], SamplingParams(20, ignore_eos=True))
        next(stream)
        with pytest.raises(RequestError, match="stream"):
            engine.generate([1], SamplingParams(1))
        told.set()

    threading.Thread(target=nested, daemon=True).start()
    assert told.wait(2)


def test_no_chat_template_and_no_tokenizer_are_named(make_model: Make, tmp_path: Path) -> None:
    from pad_engine.errors import ModelError

    folder = shutil.copytree(make_model("llama"), tmp_path / "copy")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink(missing_ok=True)
    with pytest.raises(ModelError, match="tokenizer"):
        tiny_engine(folder)
