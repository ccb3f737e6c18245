"""The process that renders chat templates: what a hostile template cannot do, and that no fault of it stays."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny import Make, tiny_engine

from pad_engine import SamplingParams, chat_template
from pad_engine.chat_template import MAX_CHARACTERS, TemplateWorker
from pad_engine.engine import Engine
from pad_engine.errors import RequestError
from pad_engine.template_worker import WARM_UP

HELLO = [{"role": "user", "content": "x"}]

SANDBOX, ANY = "may not do|fails", "may not do|fails|longer|memory|writes|valid template"
TOUCH = "open('{marker}', 'w').write('x')"
HOSTILE = {
    "subclasses": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", SANDBOX),
    "globals": ("{{ cycler.__init__.__globals__.os.system('touch {marker}') }}", SANDBOX),
    "function globals": ("{{ raise_exception.__globals__['resource'].__builtins__.{touch} }}", SANDBOX),
    "lipsum": ("{{ lipsum.__globals__['os'].popen('touch {marker}').read() }}", SANDBOX),
    "self": ("{{ self.__init__.__globals__.__builtins__.{touch} }}", SANDBOX),
    "attr filter": ("{{ (''|attr('__class__')|attr('__mro__'))[1]|attr('__subclasses__')() }}", SANDBOX),
    "map attribute": ("{{ ['']|map(attribute='__class__.__mro__')|list|first|first|attr('mro')() }}", SANDBOX),
    "format": ("{{ '{0.__class__.__init__.__globals__[os]}'.format(cycler) }}", SANDBOX),
    "indirect format": ("{% set f = '{0.__class__.x}'.format %}{{ [cycler]|map(f)|list }}", SANDBOX),
    "namespace": ("{% set ns = namespace() %}{% set ns.__class__ = dict %}{{ ns.__init__.__globals__ }}", SANDBOX),
    "generator frame": ("{{ (messages|map('upper')).gi_frame.f_builtins.{touch} }}", SANDBOX),
    "include": ("{% include '/etc/passwd' %}", SANDBOX),
    "import": ("{% import 'os' as os %}{{ os.system('touch {marker}') }}", SANDBOX),
    "change of input": ("{{ messages.append(1) }}", SANDBOX),
    "long loop": ("{% for i in range(10 ** 9) %}{% endfor %}", SANDBOX),
    "nested loops": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "longer than"),
    "power": ("{{ 10 ** (10 ** 10) }}", "longer than|memory"),
    "1 GB of output": ("{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}", "writes more than 4000000"),
    "1 GB in a block": (
        "{% set x %}{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}{% endset %}{{ x }}",
        "memory|writes|longer",
    ),
    "1 GB at once": ("{% set n = messages|length * 10 ** 9 %}{{ 'x' * n }}", "memory|writes|longer"),
    "memory by *": ("{{ [0] * 10 ** 12 }}", "more than 1024 MiB of memory"),
    "memory by doubling": (
        "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "more than 1024 MiB of memory|longer",
    ),
    "width": ("{{ '%9999999999d' % 1 }}", "memory|longer|fails"),
    "center": ("{{ 'a'|center(4000000000) }}", "memory"),
    "lipsum words": ("{{ lipsum(n=10000000) }}", "longer|memory"),
    "macros": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    "two macros": ("{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ b() }}", ANY),
    "recursive loop": ("{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}", "RecursionError"),
    "deep brackets": ("{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}", ANY),
    "deep blocks": ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, ANY),
    "syntax": ("{% if", "not a valid template"),
    "surrogate": ("{{ '\\ud800' }}", "half a surrogate pair"),
}


@pytest.fixture
def worker() -> Iterator[TemplateWorker]:
    worker = TemplateWorker()
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def engine(make_model: Make) -> Engine:
    return tiny_engine(make_model("llama"))


@pytest.mark.parametrize(("template", "words"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_template_costs_its_request_only(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, words: str
) -> None:
    marker = tmp_path / "marker"
    template = template.replace("{touch}", TOUCH).replace("{marker}", str(marker))
    worker = chat_template.WORKER
    monkeypatch.setattr(worker, "seconds", 1.0)
    assert engine.generate(HELLO, SamplingParams(1)).token_ids  # the process is up
    good = engine.tokenizer.chat_template
    monkeypatch.setattr(engine.tokenizer, "chat_template", template)
    start = time.monotonic()
    with pytest.raises(RequestError, match=words) as caught:
        engine.generate(HELLO)
    assert time.monotonic() - start < 3, "the limit, and the killing of a process with much memory"
    assert len(str(caught.value)) < 300 and str(caught.value).isprintable()
    assert not marker.exists()
    monkeypatch.setattr(engine.tokenizer, "chat_template", good)
    assert engine.generate(HELLO, SamplingParams(1)).token_ids
    assert engine.generate("text", SamplingParams(1)).token_ids


def test_a_hostile_model_folder(make_model: Make, tmp_path: Path) -> None:
    folder, marker = tmp_path / "model", tmp_path / "marker"
    shutil.copytree(make_model("llama"), folder)
    template = f"{{{{ cycler.__init__.__globals__.os.system('touch {marker}') }}}}"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    (folder / "chat_template.jinja").write_text(template)
    engine = tiny_engine(folder)
    with pytest.raises(RequestError, match="what a template may not do"):
        engine.generate(HELLO)
    assert engine.generate("text", SamplingParams(1)).token_ids and not marker.exists()


def test_the_process_has_nothing_to_give_away(worker: TemplateWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "secret")
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    worker.render("", {})
    os.close(reader)
    os.close(writer)
    assert worker.process
    pid = worker.process.pid
    assert b"secret" not in Path(f"/proc/{pid}/environ").read_bytes()
    assert sorted(os.listdir(f"/proc/{pid}/fd")) == ["0", "1", "2"]
    assert os.readlink(f"/proc/{pid}/cwd") == "/" and os.getsid(pid) == pid
    for kind, most in (("AS", 1 << 30), ("NOFILE", 3), ("FSIZE", 0), ("CORE", 0), ("NPROC", 0)):
        assert max(resource.prlimit(pid, getattr(resource, f"RLIMIT_{kind}"))) <= most


def test_without_rights_no_file_is_opened(tmp_path: Path) -> None:
    # as if the sandbox were not there
    code = "from pad_engine import template_worker as w; import sys; w.give_up_rights(1 << 30); open(sys.argv[1], 'w')"
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "marker"], capture_output=True, text=True)
    assert done.returncode == 1 and "OSError: [Errno 24]" in done.stderr and not (tmp_path / "marker").exists()


def test_warm_up_is_run_to_its_end(worker: TemplateWorker) -> None:
    # it ends with raise_exception; all that it needs is imported by then
    with pytest.raises(RequestError, match="refuses these messages"):
        worker.render(WARM_UP, {})


def test_a_dead_process_is_replaced(worker: TemplateWorker) -> None:
    assert worker.render("{{ x }}", {"x": 1}) == "1"
    assert worker.process
    worker.process.kill()
    worker.process.wait()
    assert worker.render("{{ x }}", {"x": 2}) == "2", "it died between two requests, which is nobody's fault"
    timer = threading.Timer(0.2, lambda: os.kill(worker.process.pid, signal.SIGKILL))  # type: ignore[union-attr]
    timer.start()
    with pytest.raises(RequestError, match="ended the process"):
        worker.render(HOSTILE["nested loops"][0], {})
    timer.join()
    assert worker.render("{{ x }}", {"x": 3}) == "3"


def test_ctrl_c_while_rendering(worker: TemplateWorker) -> None:
    worker.render("", {})
    main = threading.main_thread().ident
    assert main
    timer = threading.Timer(0.2, signal.pthread_kill, [main, signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        worker.render(HOSTILE["nested loops"][0], {})
    assert worker.render("{{ x }}", {"x": 4}) == "4"


def test_an_answer_that_is_nonsense(worker: TemplateWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    # what a template might say that has found a way out of the sandbox
    real = subprocess.Popen
    hello = '{"id": 0, "text": ""}'
    for lines, words in (
        (("[]",), "does not start"),
        (('{"id": 0, "error": "jinja2", "words": "2.0"}',), "jinja2 2.0 is not safe"),
        ((hello, "nonsense"), "ended the process"),
        ((hello, "[" * 100_000), "ended the process"),
        ((hello, '{"id": 99, "text": "stale"}'), "ended the process"),
        ((hello, '{"id": 1, "text": 3}'), "ended the process"),
    ):
        script = "".join(f"read line; printf '%s\\n' '{line}';" for line in lines) + "exec sleep 9"
        fake = ["sh", "-c", script]
        monkeypatch.setattr(subprocess, "Popen", lambda command, fake=fake, **options: real(fake, **options))
        worker.close()
        worker.count = 0
        with pytest.raises(RequestError, match=words):
            worker.render("", {})
    monkeypatch.setattr(subprocess, "Popen", real)
    assert worker.render("yes", {}) == "yes"


def test_large_chats_pass(worker: TemplateWorker) -> None:
    text = "x" * (MAX_CHARACTERS - 10)
    assert worker.render("{{ x }}", {"x": text}) == text
    wide = "😀" * 300_000
    assert worker.render("{{ x }}", {"x": wide}) == wide


def test_threads_get_their_own_answers(worker: TemplateWorker) -> None:
    wrong: list[int] = []

    def ask(number: int) -> None:
        for i in range(20):
            if worker.render("{{ a }}-{{ b }}", {"a": number, "b": i}) != f"{number}-{i}":
                wrong.append(number)

    threads = [threading.Thread(target=ask, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forked_process_has_its_own() -> None:
    code = (
        "import os; from pad_engine.chat_template import WORKER\n"
        "WORKER.render('', {}); pid = os.fork()\n"
        "good = all(WORKER.render('{{ x }}', {'x': (pid, i)}) == str([pid, i]) for i in range(50))\n"
        "if pid == 0: WORKER.close(); os._exit(not good)\n"
        "print(good and os.waitpid(pid, 0)[1] == 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n"


def test_no_process_is_left_behind() -> None:
    code = (
        "import os, sys; from pad_engine.chat_template import WORKER\n"
        "WORKER.seconds = 0.5; WORKER.render('', {}); print(WORKER.process.pid, flush=True)\n"
        "if sys.stdin.readline(): WORKER.render('{% for i in range(99999) %}{% for j in range(99999) %}"
        "{% endfor %}{% endfor %}', {})"
    )
    for busy in (False, True):
        parent = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert parent.stdin and parent.stdout
        pid = int(parent.stdout.readline())
        if busy:
            parent.stdin.write("go\n")
            parent.stdin.flush()
            time.sleep(0.2)
            parent.kill()
        parent.communicate(timeout=60)
        deadline = time.monotonic() + 10
        while alive(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not alive(pid)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
