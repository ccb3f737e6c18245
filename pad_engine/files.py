"""Files that are written whole or not at all, or grow by one process alone, and are refused before the work if their
place is none."""

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from pad_engine.errors import RequestError

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)  # what some network disks say: there it goes without


def check_place(path: Path) -> None:
    """RequestError unless a file can be written there."""
    folder = path.parent
    if path.is_dir():
        raise RequestError(f"{path} is a folder, expected a file")
    if not folder.is_dir():
        raise RequestError(f"{path} cannot be written: there is no folder {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RequestError(f"{path} cannot be written: nothing may be written in {folder}")


def write_file(path: Path, content: bytes) -> None:
    """Write a file beside the path, which then takes its place. RequestError if that cannot be done."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with part.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """The same with JSON."""
    write_file(path, (json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())


def remove_file(path: Path) -> None:
    """Remove a file, if there is one. RequestError if that cannot be done."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise RequestError(f"{path} cannot be removed: {error.strerror}") from error


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Keep a file that grows to this process. RequestError where another one has it.

    The file itself may be replaced meanwhile, so what is locked is `.NAME.lock` beside it. That goes at the end; one
    that a killed process has left is locked by nobody, and is used again.
    """
    real = path.resolve()
    lock = real.with_name(f".{real.name}.lock")
    try:
        descriptor = lock_file(lock)
    except BlockingIOError as error:
        raise RequestError(f"another process writes to {path}", "wait until it ends, or give another --out") from error
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {lock} cannot be locked: {error.strerror}") from error
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)  # first, or it might be another's already
        os.close(descriptor)


def take_lock(file: int | IO[str], wait: bool = False) -> bool:
    """Lock an open file until it is closed, or the process is gone. False on a disk that knows no locks. OSError if it
    cannot be done, BlockingIOError where another process has it, unless it is to be waited for."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return False
    return True


def lock_file(lock: Path) -> int:
    """Make a file if there is none, and lock it until the descriptor that is returned is closed, or the process is
    gone. OSError if that cannot be done, BlockingIOError where another process has it."""
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not take_lock(descriptor) or os.path.samestat(os.fstat(descriptor), lock.stat()):
                return descriptor
        except FileNotFoundError:
            pass
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)  # another process has removed this one since it was opened
