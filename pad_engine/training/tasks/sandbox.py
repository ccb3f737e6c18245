"""Runs a program that a model wrote, and tells whether it came to its end without an exception.

It is a process of its own (sandbox_worker.py), without this one's environment, descriptors and standard streams, in an
empty folder that is removed, as a process group that is killed when it is over. Beside time and memory the process
denies itself, by a system-call filter that needs no privileges: further processes and threads, signals to others,
sockets, and every change of a file.

Contained: endless loops, sleeps and recursion, memory, fork bombs, output, files written or deleted, network, killing
the user's other programs. A program passes only if it runs to its end: `sys.exit`, `os._exit` and whatever it prints
do not pass.

Not contained: reading. The program can read what this user can; it has nowhere to send it. Nor is the verdict safe
from a program that is made to deceive: it shares the interpreter with the harness and could read the token from its
descriptor, and values of its own may equal everything. Do not run what an adversary wrote.
"""

import os
import secrets
import select
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from pad_engine.errors import RequestError

WORKER = Path(__file__).with_name("sandbox_worker.py")
# what an unusual Python needs to start
KEPT_ENVIRONMENT = ("LD_LIBRARY_PATH",)
READY = b"ready\n"
START_SECONDS = 20.0  # of the interpreter itself, on a busy machine


@dataclass(frozen=True)
class Limits:
    """seconds: of computing, and of waiting. memory: bytes of address space."""

    seconds: float = 5.0
    memory: int = 512 << 20


def passes(program: str, limits: Limits | None = None) -> bool:
    """Whether a Python program ends without an exception, within the limits.

    RequestError where the process cannot confine itself: other systems than Linux on x86-64 and arm64.
    """
    limits = limits or Limits()
    token = secrets.token_bytes(16)
    with TemporaryDirectory(prefix="pad-sandbox-") as folder:
        path = Path(folder, "program.py")
        path.write_text(program, encoding="utf-8", errors="replace")
        said = run(path, token, limits)
    if not said.startswith(READY):
        reason = said.decode(errors="replace").strip() or "its process ended"
        raise RequestError(f"the sandbox does not start: {reason}", "it needs Linux on x86-64 or arm64")
    return said == READY + token


def run(path: Path, token: bytes, limits: Limits) -> bytes:
    """What the harness says of a program: "ready" and, after its end, the token."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-I",
            "-S",
            "-B",
            "-X",
            "utf8",
            str(WORKER),
            str(path),
            str(limits.seconds),
            str(limits.memory),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        cwd=path.parent,
        env={name: os.environ[name] for name in KEPT_ENVIRONMENT if name in os.environ},
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    with process.stdin, process.stdout:
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(token)
            said = next_words(process.stdout, START_SECONDS)
            if said == READY:
                said += next_words(process.stdout, limits.seconds)
        finally:
            # the process is not waited for yet, so that the number is still its group's
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return said


def next_words(pipe: IO[bytes], seconds: float) -> bytes:
    """What comes out of a pipe next; nothing where it closes or the time is up."""
    readable, _, _ = select.select([pipe], [], [], seconds)
    return os.read(pipe.fileno(), 1000) if readable else b""
