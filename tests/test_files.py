"""Files of one process at a time: the lock, what is left of it, and who is refused."""

import subprocess
import sys
from pathlib import Path

import pytest

from pad_engine import files
from pad_engine.errors import RequestError
from pad_engine.files import held, remove_file, write_file

HOLD = """
import sys, time
from pathlib import Path
from pad_engine.files import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_held_file_is_refused_to_others(tmp_path: Path) -> None:
    """By whatever name it is asked for, and though it is replaced meanwhile; nothing is left."""
    path, link = tmp_path / "r.jsonl", tmp_path / "link.jsonl"
    link.symlink_to(path)
    with held(path):
        write_file(path, b"new")
        assert (tmp_path / ".r.jsonl.lock").exists()
        for name in (path, link):
            with pytest.raises(RequestError, match=f"another process writes to {name}"), held(name):
                pass
        with held(tmp_path / "other.jsonl"):
            pass
    with held(path):
        pass
    assert sorted(one.name for one in tmp_path.iterdir()) == ["link.jsonl", "r.jsonl"]


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        with pytest.raises(RequestError, match="another process writes to"), held(path):
            pass
        process.kill()
    assert (tmp_path / ".r.jsonl.lock").exists()
    with held(path):
        pass
    assert not list(tmp_path.iterdir())


def test_a_lock_that_was_removed_meanwhile_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its opening and its locking the one who had it may have gone, and another may have come."""
    lock, flock = tmp_path / ".r.jsonl.lock", files.fcntl.flock
    for replace in (False, True):
        removed = []

        def late(descriptor: int, how: int, replace: bool = replace, removed: list[int] = removed) -> None:
            if not removed:
                removed.append(descriptor)
                lock.unlink()
                if replace:
                    lock.touch()
            flock(descriptor, how)

        monkeypatch.setattr(files.fcntl, "flock", late)
        with held(tmp_path / "r.jsonl"):
            monkeypatch.setattr(files.fcntl, "flock", flock)
            with pytest.raises(RequestError, match="another process"), held(tmp_path / "r.jsonl"):
                pass
        assert removed and not list(tmp_path.iterdir())


def test_a_disk_without_locks_goes_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(descriptor: int, how: int) -> None:
        raise OSError(files.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", unknown)
    with held(tmp_path / "r.jsonl"), held(tmp_path / "r.jsonl"):
        pass
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_locked_or_removed_is_named(tmp_path: Path) -> None:
    place = tmp_path / "none" / "r.jsonl"
    with pytest.raises(RequestError, match=r"r\.jsonl cannot be written: .*lock cannot be locked"), held(place):
        pass
    with pytest.raises(RequestError, match="cannot be removed"):
        remove_file(tmp_path)
    remove_file(tmp_path / "none.json")
