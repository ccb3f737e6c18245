"""Chat messages to the text and the ids that a model expects, by the template that comes with the model.

A template is a program out of somebody's model folder. It runs in a process of its own (template_worker.py) without
files, other programs or secrets, and with bounds on time, memory and output; the worst it can do is a RequestError.
"""

import atexit
import importlib.util
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pad_engine.errors import RequestError

Message = Mapping[str, Any]

SECONDS = 2.0
MEMORY = 1 << 30
MAX_CHARACTERS = 4_000_000
# of the process itself, on a busy machine
START_SECONDS = 30.0
# the process gets these and nothing else of the environment: the time zone, and what an unusual Python needs to start
KEPT_ENVIRONMENT = ("TZ", "LD_LIBRARY_PATH")
USE_TEXT = "give the prompt as text, or another template to the tokenizer"


class WorkerLostError(Exception):
    """The process has ended, or speaks nonsense."""


class TemplateWorker:
    """The process that renders, for all threads. It starts when it is needed, stays, and is replaced after a template
    has failed in it. seconds, memory, max_characters: what one rendering may take."""

    def __init__(self, seconds: float = SECONDS, memory: int = MEMORY, max_characters: int = MAX_CHARACTERS) -> None:
        self.seconds, self.memory, self.max_characters = seconds, memory, max_characters
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.ready = False
        self.count = 0

    def start(self) -> None:
        """Start the process if there is none, without waiting for it."""
        with self.lock:
            self._start()

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """The template's text. RequestError when it refuses the variables, fails, or takes more than it may."""
        with self.lock:
            try:
                answer = self._ask({"template": template, "variables": variables})
            except BaseException:
                # what it would still answer belongs to nobody
                self._kill()
                raise
            # a refusal is a template's ordinary way to speak; whatever else went wrong may have left something behind
            if not isinstance(answer.get("text"), str) and answer.get("error") != "refused":
                self._kill()
        return self._text_of(answer)

    def close(self) -> None:
        """End the process; the next rendering starts another."""
        with self.lock:
            self._kill()

    def forget(self) -> None:
        """Leave the process to the parent that this one was forked from."""
        self.lock, self.process = threading.Lock(), None

    def _start(self) -> subprocess.Popen[bytes]:
        if self.process is not None and self.process.poll() is None:
            return self.process
        self._kill()
        command = [sys.executable, "-I", "-S", "-X", "utf8", str(Path(__file__).with_name("template_worker.py"))]
        self.process = subprocess.Popen(
            command + package_folders("jinja2", "markupsafe"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            env={name: os.environ[name] for name in KEPT_ENVIRONMENT if name in os.environ},
            # Ctrl-C is for this process alone
            start_new_session=True,
        )
        self.ready = False
        return self.process

    def _kill(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe:
                    pipe.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._start()
        try:
            if not self.ready:
                hello = exchange(process, {"memory": self.memory}, START_SECONDS, limit=1000)
                if hello.get("id") != 0 or "text" not in hello:
                    return hello
                self.ready = True
            self.count += 1
            request |= {"id": self.count, "seconds": self.seconds, "max_characters": self.max_characters}
            # a character takes at most two escapes of six characters
            answer = exchange(process, request, self.seconds, limit=12 * self.max_characters + 10_000)
        except TimeoutError:
            return {"error": "time" if self.ready else "start"}
        except (WorkerLostError, OSError):
            return {"error": "lost" if self.ready else "start"}
        return answer if answer.get("id") == self.count else {"error": "lost"}

    def _text_of(self, answer: dict[str, Any]) -> str:
        text, words = answer.get("text"), short(answer.get("words", ""))
        if isinstance(text, str):
            check_text(text, "the chat template's text")
            return text
        match answer.get("error"):
            case "refused":
                raise RequestError(f"the model's chat template refuses these messages: {words}")
            case "start":
                raise RequestError("the process that renders chat templates does not start", "is jinja2 installed?")
            case "jinja2":
                raise RequestError(
                    f"jinja2 {words} is not safe for chat templates", "pip install --upgrade 'jinja2>=3.1.6'"
                )
            case "time":
                what = f"takes longer than {self.seconds:g} s"
            case "output":
                what = f"writes more than {self.max_characters} characters"
            case "memory":
                what = f"needs more than {self.memory >> 20} MiB of memory"
            case "security":
                what = f"does what a template may not do: {words}"
            case "syntax":
                what = f"is not a valid template: {words}"
            case "failed":
                what = f"fails: {words}"
            case _:
                what = "ended the process that renders it"
        raise RequestError(f"the model's chat template {what}", USE_TEXT)


def exchange(
    process: subprocess.Popen[bytes], message: Mapping[str, Any], seconds: float, limit: int
) -> dict[str, Any]:
    """Send one object and wait for the one that comes back. TimeoutError, or WorkerLostError for anything but one
    object of at most `limit` bytes."""
    assert process.stdin and process.stdout
    sink, source = process.stdin.fileno(), process.stdout.fileno()
    os.set_blocking(sink, False)
    left = memoryview(json.dumps(message).encode() + b"\n")
    received = bytearray()
    deadline = time.monotonic() + seconds
    poll = select.poll()
    poll.register(source, select.POLLIN)
    poll.register(sink, select.POLLOUT)
    while not received.endswith(b"\n"):
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        for handle, _ in poll.poll(1000 * remaining):
            if handle == sink:
                left = left[os.write(sink, left) :]
                if not left:
                    poll.unregister(sink)
            else:
                part = os.read(source, 1 << 16)
                received += part
                if not part or len(received) > limit:
                    raise WorkerLostError
    try:
        answer = json.loads(received)
    except (ValueError, RecursionError) as error:
        raise WorkerLostError from error
    if not isinstance(answer, dict):
        raise WorkerLostError
    return answer


def package_folders(*packages: str) -> list[str]:
    """Where packages are installed."""
    specs = [importlib.util.find_spec(package) for package in packages]
    origins = [spec.origin for spec in specs if spec is not None and spec.origin]
    return list(dict.fromkeys(str(Path(origin).parent.parent) for origin in origins))


def short(words: Any) -> str:
    """A stranger's words on one line, without control characters."""
    text = "".join(character if character.isprintable() else " " for character in str(words)[:1000])
    text = " ".join(text.split())
    return text if len(text) <= 200 else f"{text[:200]}..."


def check_text(text: str, what: str) -> None:
    """RequestError for text that has no UTF-8, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{what} holds half a surrogate pair at character {error.start}, which is no text") from None


WORKER = TemplateWorker()
atexit.register(WORKER.close)
os.register_at_fork(after_in_child=WORKER.forget)


def start() -> None:
    """Start the process that renders, so that the first chat does not wait for it."""
    WORKER.start()


def chat_ids(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """The ids of a chat whose next message is the model's. The template brings its own special tokens, so the tokenizer
    adds none: the same ids as transformers' apply_chat_template."""
    return list(tokenizer(chat_text(tokenizer, messages), add_special_tokens=False).input_ids)


def chat_text(tokenizer: Any, messages: Sequence[Message]) -> str:
    """The same as text."""
    template = template_of(tokenizer)
    plain = [check_message(message, index) for index, message in enumerate(messages)]
    if not plain:
        raise RequestError("a chat needs at least one message")
    try:
        size = len(json.dumps(plain, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"messages must hold what JSON can hold: {short(error)}") from error
    if size > WORKER.max_characters:
        raise RequestError(f"the messages have {size} characters, and at most {WORKER.max_characters} are allowed")
    variables = {"messages": plain, "tools": None, "documents": None, "add_generation_prompt": True}
    return WORKER.render(template, variables | dict(tokenizer.special_tokens_map))


def template_of(tokenizer: Any) -> str:
    """The tokenizer's template; of several, the one named "default"."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Sequence) and not isinstance(template, str):
        entries = [entry for entry in template if isinstance(entry, Mapping)]
        template = {entry.get("name"): entry.get("template") for entry in entries}
    if isinstance(template, Mapping):
        if "default" not in template:
            names = short(", ".join(sorted(map(str, template))))
            raise RequestError(f'this model has several chat templates, and none is named "default": {names}')
        template = template["default"]
    if not template:
        raise RequestError("this model has no chat template", "give the prompt as text")
    if not isinstance(template, str):
        raise RequestError(f"the model's chat template must be text, got {type(template).__name__}")
    return template


def check_message(message: Message, index: int) -> dict[str, Any]:
    """A message as a plain dict. It needs a role and a content, both text; more keys are for the template to use."""
    if not isinstance(message, Mapping):
        raise RequestError(f"messages[{index}] must have a role and a content, got {type(message).__name__}")
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            got = type(message[key]).__name__ if key in message else "none"
            raise RequestError(f"messages[{index}] needs a {key} that is text, got {got}")
        check_text(message[key], f"messages[{index}]'s {key}")
    if not message["role"]:
        raise RequestError(f"messages[{index}] needs a role that is not empty")
    return {key: value for key, value in message.items() if value is not None}
