"""What every command shares with the terminal: quiet libraries, errors in one line, Ctrl-C, terms to accept.

Imports of torch and transformers stay inside functions, so that `pad --help` does not wait for them.
"""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
        # The reader has seen enough. What is left in the buffer must go somewhere when the interpreter closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None


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
