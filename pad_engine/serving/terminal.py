"""What every command shares with the terminal: quiet libraries, errors in one line, Ctrl-C, terms to accept.

Imports of torch and transformers stay inside functions, so that `pad --help` does not wait for them.
"""

import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import typer

from pad_engine.errors import PadError, RequestError

# 0: done. What the shell itself reports for a program that Ctrl-C has ended is 128 + SIGINT.
FAILED, BAD_USAGE, INTERRUPTED = 1, 2, 130

_QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def quiet() -> None:
    """Keep the chatter of libraries off the terminal; call it before they are imported. What the user has set in the
    environment, or by `python -W`, is kept. Our own warnings become one line each."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", module=r"pad_engine\.")
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"


def open_streams() -> None:
    """Streams that can be used, whatever the shell gave: one that it closed is as good as an empty one."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - for the process
        elif mode == "w":
            # a terminal that cannot show a character gets a question mark, not an error
            stream.reconfigure(errors="replace")


def catch_interrupts() -> None:
    """Ctrl-C ends the program also while torch is imported, which loses a KeyboardInterrupt or aborts of it. A shell
    that has it ignored keeps that."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupted)


def interrupted(number: int, frame: FrameType | None) -> None:
    """The handler of Ctrl-C."""
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    if getattr(spec, "_initializing", False):  # as the import system marks a module that is not ready
        os._exit(INTERRUPTED)
    signal.default_int_handler(number, frame)


@contextmanager
def reported(bad_request: int = FAILED) -> Iterator[None]:
    """Turn what may go wrong into lines on standard error and an exit code, without a traceback.

    bad_request: the code of a RequestError, which is bad usage while options are looked at.
    """
    try:
        yield
        sys.stdout.flush()
    except PadError as error:
        print("error:", one_line(str(error)), file=sys.stderr)
        if error.hint:
            print("hint:", one_line(error.hint), file=sys.stderr)
        if isinstance(error.__cause__, KeyboardInterrupt):
            raise typer.Exit(INTERRUPTED) from None
        raise typer.Exit(bad_request if isinstance(error, RequestError) else FAILED) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        drop_output()  # the reader has seen enough
        raise typer.Exit(0) from None
    except OSError as error:  # a full disk behind standard output, for one
        print("error:", one_line(str(error)), file=sys.stderr)
        drop_output()
        raise typer.Exit(FAILED) from None


def drop_output() -> None:
    """What is left in the buffer of standard output must go somewhere when the interpreter closes it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def one_line(text: str) -> str:
    """The text without line breaks."""
    return " ".join(text.split())


def fetch(model: str, accept_terms: bool) -> Path:
    """The folder of a model. If terms must be accepted first, they are asked for where somebody can answer."""
    from pad_engine.models.sources import TermsError, resolve

    try:
        return resolve(model, accept_terms=accept_terms)
    except TermsError as error:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise
        print(error, file=sys.stderr)
        if not typer.confirm("Have you read them, and do you accept them?", err=True):
            raise typer.Exit(FAILED) from None
    return resolve(model, accept_terms=True)
