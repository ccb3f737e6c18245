"""`pad chat`: turns and what they cost, commands, errors after which the chat goes on, Ctrl-C, pipes and terminals."""

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from test_cli import MAIN, pad
from tiny import Make, tiny_engine
from typer.testing import Result

from pad_engine import SamplingParams
from pad_engine.chat_template import chat_ids
from pad_engine.errors import RequestError
from pad_engine.output import Stats
from pad_engine.serving.session import Session

# the tiny model says nothing but "a" then, so that its words become the same tokens again
ONLY_A = SamplingParams(8, logit_bias={ord("a"): 100})


@pytest.fixture(scope="module")
def folder(make_model: Make) -> Path:
    return make_model("llama")


def chat(folder: Path, *lines: str | bytes, options: tuple[str, ...] = ()) -> Result:
    stdin = b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines)
    fixed = ("--model", folder, "--device", "cpu", "--max-tokens", "8", "--logit-bias", "97=100")
    return pad("chat", *fixed, *options, stdin=stdin)


def errors(result: Result) -> list[str]:
    assert "Traceback" not in result.output
    return [line for line in result.stderr.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_a_turn_costs_its_new_tokens(folder: Path, drafter: str) -> None:
    session = Session(tiny_engine(folder, drafter), ONLY_A)
    held = 0
    for turn, text in enumerate(["hello", "and more", "the end"]):
        out, interrupted = session.ask(text, None)
        assert out.text == "aaaaaaaa" and not interrupted
        assert out.stats.reused_tokens == held
        new = len(f"<user>{text}\n<assistant>") + (turn > 0) * len("a\n")
        assert out.stats.prompt_tokens - held == new, "the last token of a reply has not been read yet"
        fresh = tiny_engine(folder).generate(session.prompt()[:-1], ONLY_A)
        assert out.token_ids == fresh.token_ids
        held = out.stats.prompt_tokens + 7
    assert [message["role"] for message in session.messages] == ["user", "assistant"] * 3


def test_the_system_message_is_read_ahead(folder: Path) -> None:
    engine = tiny_engine(folder)
    session = Session(engine, ONLY_A, "be brief")
    out, _ = session.ask("hello", None)
    assert session.prompt()[0] == {"role": "system", "content": "be brief"}
    assert out.stats.reused_tokens == len("<system>be brief\n<")
    assert out.stats.prompt_tokens == len(chat_ids(engine.tokenizer, session.prompt()[:2]))


def test_templates_that_take_no_system_message_by_itself(folder: Path) -> None:
    engine = tiny_engine(folder)
    engine.tokenizer.chat_template = (
        "{% if messages|length < 2 %}{{ raise_exception('no user') }}{% endif %}" + engine.tokenizer.chat_template
    )
    session = Session(engine, ONLY_A, "be brief")
    assert session.ask("hello", None)[0].text == "aaaaaaaa"
    assert session.ask("hello", None)[0].stats.reused_tokens > 30


def test_another_request_in_between_changes_nothing(folder: Path) -> None:
    engine = tiny_engine(folder, "ngram")
    params = SamplingParams(12, temperature=1.0, seed=3, ignore_eos=True)
    session = Session(engine, params)
    session.ask("hello", None)
    engine.generate("something else", params)
    out, _ = session.ask("more", None)
    assert out.stats.reused_tokens == 0
    assert out.token_ids == tiny_engine(folder).generate(session.prompt()[:-1], params).token_ids
    assert session.ask("yet more", None)[0].stats.reused_tokens > 0


def test_undo_leaves_no_trace(folder: Path) -> None:
    params = SamplingParams(12, ignore_eos=True)
    session, other = (Session(tiny_engine(folder, "ngram"), params) for _ in range(2))
    for text in ("one", "two"):
        session.ask(text, None)
    assert session.undo() == "two" and len(session.messages) == 2
    other.ask("one", None)
    assert session.ask("three", None)[0].token_ids == other.ask("three", None)[0].token_ids
    assert session.messages == other.messages
    assert (session.undo(), session.undo(), session.undo()) == ("three", "one", None)


def test_a_chat_that_is_too_long_goes_on_after_undo(folder: Path) -> None:
    session = Session(tiny_engine(folder, max_length=80), ONLY_A)
    session.ask("x" * 30, None)
    for _ in range(2):
        with pytest.raises(RequestError, match="a context of 80 has no room") as caught:
            session.ask("y" * 30, None)
        assert "/undo" in caught.value.hint and len(session.messages) == 2
    session.undo()
    assert session.ask("y" * 30, None)[0].text == "aaaaaaaa"


def test_save_is_whole_and_asks_before_it_overwrites(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    result = chat(folder, "hé", "/undo", "/system be brief", "hello", f"/save {path}")
    assert result.exit_code == 0 and not errors(result), result.output
    saved = json.loads(path.read_text(encoding="utf-8"))
    assert saved["model"] == str(folder)
    assert saved["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "aaaaaaaa"},
    ]
    [reply] = saved["replies"]
    assert reply["finish_reason"] == "length" and reply["stats"]["completion_tokens"] == 8
    before = path.read_bytes()
    result = chat(folder, "other", f"/save {path}", f"/save {tmp_path / 'no' / 'x'}", "/save", f"/save! {tmp_path}")
    assert [line.split(": ")[1].split()[-1] for line in errors(result)] == ["exists", "written", "file", "written"]
    assert result.exit_code == 1 and path.read_bytes() == before
    assert chat(folder, "other", f"/save! {path}").exit_code == 0
    assert json.loads(path.read_text())["messages"][0]["content"] == "other"
    assert os.listdir(tmp_path) == ["chat.json"], "nothing is left over"


def test_a_piped_chat_prints_replies_alone(folder: Path) -> None:
    result = chat(folder, "one", "", "/stats", "//two", "/help", "/undo", "/exit", "three")
    assert result.exit_code == 0, result.output
    assert result.stdout == "aaaaaaaa\naaaaaaaa\n"
    assert "/save! FILE overwrites" in result.stderr and "taken back: /two" in result.stderr
    assert "last reply: 8 tokens in " in result.stderr and "1 replies: 8 tokens" in result.stderr
    assert "> " not in result.stderr and "cut by --max-tokens" in result.stderr


def test_errors_do_not_end_a_chat(folder: Path) -> None:
    lines = ("/nonsense", "/undo now", b"\xff\xfe", "x" * 300, "/stats", "/undo", "one")
    result = chat(folder, *lines, options=("--system", "be brief"))
    assert result.exit_code == 1, "which a script sees"
    assert result.stdout == "aaaaaaaa\n"
    words = ("no command '/nonsense'", "/undo takes nothing after it", "not UTF-8", "has no room for a reply")
    assert len(errors(result)) == 4
    assert all(word in line for word, line in zip(words, errors(result), strict=True)), result.stderr
    assert "no reply yet" in result.stderr and "there is no turn to take back" in result.stderr


def test_bad_options_are_bad_usage(folder: Path) -> None:
    assert chat(Path("/no/such"), options=("--temperature", "-1")).exit_code == 2
    assert chat(folder, options=("--rule", "lucky")).exit_code == 2
    assert chat(Path("/no/such"), "one").exit_code == 1


def test_a_model_without_a_template_is_refused_at_once(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "model")
    (copy / "chat_template.jinja").unlink()
    result = chat(copy, "one")
    assert result.exit_code == 2 and errors(result) == ["error: this model has no chat template"]


@pytest.mark.parametrize("at_round", [1, 3])
def test_ctrl_c_keeps_what_has_come(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_round: int
) -> None:
    add, signals = Stats.add, []

    def add_and_interrupt(stats: Stats, commit: object) -> None:
        add(stats, commit)  # type: ignore[arg-type]
        if stats.rounds == at_round + 1 and not signals:
            signals.append(1)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Stats, "add", add_and_interrupt)
    path = tmp_path / "chat.json"
    result = chat(folder, "one", "two", "/stats", f"/save {path}", options=("--drafter", "none"))
    assert result.exit_code == 0, result.output
    cut = "a" * (at_round + 1)
    assert result.stdout == f"{cut}\naaaaaaaa\n" and "cancelled: the reply is kept" in result.stderr
    saved = json.loads(path.read_text())
    assert [message["content"] for message in saved["messages"]] == ["one", cut, "two", "aaaaaaaa"]
    assert [reply["finish_reason"] for reply in saved["replies"]] == ["cancelled", "length"]
    first, second = (reply["stats"] for reply in saved["replies"])
    assert second["reused_tokens"] == first["prompt_tokens"] + at_round


def test_ctrl_c_before_the_reply_keeps_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add, signals = Stats.add, []

    def interrupt_first(stats: Stats, commit: object) -> None:
        if not signals:
            signals.append(1)
            signal.raise_signal(signal.SIGINT)
        add(stats, commit)  # type: ignore[arg-type]

    monkeypatch.setattr(Stats, "add", interrupt_first)
    result = chat(folder, "one", "two", "/stats")
    assert result.exit_code == 0 and "nothing had come, so the turn is not kept" in result.stderr, result.output
    assert result.stdout == "\naaaaaaaa\n" and "1 replies" in result.stderr


def test_a_terminal(make_model: Make) -> None:
    folder = make_model("llama", max_position_embeddings=32768)
    main, side = pty.openpty()
    options = ["--model", str(folder), "--device", "cpu", "--drafter", "none", "--logit-bias", "97=100"]
    options += ["--max-tokens", "30000", "--max-length", "32768"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "dumb"}
    process = subprocess.Popen([*MAIN, "chat", *options], stdin=side, stdout=side, stderr=side, env=env)
    os.close(side)
    try:
        talk(main, process)
        assert process.wait(timeout=60) == 0, "an error on the way is no failure of a person's chat"
    finally:
        process.kill()
        process.wait()
        os.close(main)


def talk(terminal: int, process: "subprocess.Popen[bytes]") -> None:
    seen = ""

    def until(words: str, again: int = 0) -> None:
        nonlocal seen
        deadline = time.monotonic() + 60
        while words not in seen:
            assert time.monotonic() < deadline, f"no {words!r} in {seen!r}"
            if select.select([terminal], [], [], 1)[0]:
                seen += os.read(terminal, 4096).decode(errors="replace")
            elif again:
                process.send_signal(again)
        seen = seen[seen.index(words) + len(words) :]

    until("Ctrl-D leaves")
    until("> ")
    os.write(terminal, b"half a line")
    until("half a line")
    # at the prompt: the line is dropped, the chat goes on. Python's readline misses a signal while it handles a key
    until("> ", again=signal.SIGINT)
    os.write(terminal, b"hello\n")
    until("aaaa")
    process.send_signal(signal.SIGINT)
    until("cancelled: the reply is kept")
    until("> ")
    os.write(terminal, b"/stats\n")
    until("1 replies")
    until("> ")
    os.write(terminal, b"/nonsense\n")
    until("error: no command")
    until("> ")
    os.write(terminal, b"\x04")
