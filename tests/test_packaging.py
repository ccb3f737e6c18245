"""What is built and installed: the wheel with and without a compiler, from a copy of the sources."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
SOURCES = ("setup.py", "pyproject.toml", "CMakeLists.txt", "MANIFEST.in", "README.md", "LICENSE")
IMPORT = (
    "import pad_engine.kernels.gumbel as g, pad_engine.native as n, sys; "
    "print(g.__file__, n.available(), n.missing_reason(), sep='|')"
)

# network: pip fetches cmake and ninja for the build
pytestmark = [pytest.mark.slow, pytest.mark.network]


def packages() -> set[str]:
    """Folders with Python in them, as they must be in the wheel."""
    folders = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "pad_engine").rglob("*.py")}
    return folders | {"pad_engine/kernels"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    copy = tmp_path / "source"
    copy.mkdir()
    for name in SOURCES:
        shutil.copy(ROOT / name, copy)
    for name in ("csrc", "kernels", "pad_engine"):
        # a library that an editable install left behind comes along: it must not get into a wheel by itself
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture
def no_compiler(tmp_path: Path) -> dict[str, str]:
    """An environment whose PATH holds a Python and nothing else. CMake would still look in /usr/bin: CXX stops that."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python3").symlink_to(sys.executable)
    return {"PATH": str(folder), "CC": str(folder / "cc"), "CXX": str(folder / "c++")}


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX", "PAD_CUDA")}
    return subprocess.run(
        [str(part) for part in command],
        **{"cwd": cwd, "env": inherited | environment, "capture_output": True, "text": True, "check": False},
    )


def build_wheel(source: Path, **environment: str) -> tuple[Path, str]:
    """The wheel, and what the build printed."""
    out = source / "wheels"
    shutil.rmtree(out, ignore_errors=True)
    pip = (sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "-w", out, ".")
    result = run(*pip, cwd=source, **environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return next(out.glob("*.whl")), result.stdout + result.stderr


def import_from_venv(tmp_path: Path, *requirement: str | Path) -> tuple[str, str, str]:
    """Install into a fresh venv that borrows this one's dependencies; import from an unrelated folder."""
    venv, elsewhere = tmp_path / "venv", tmp_path / "elsewhere"
    elsewhere.mkdir()
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    python = venv / "bin" / "python"
    result = run(python, "-m", "pip", "install", "--no-deps", *requirement, cwd=elsewhere)
    assert result.returncode == 0, result.stdout + result.stderr
    # appended, so that a pad_engine installed there comes second to this one
    borrow = f"import sys; sys.path.append({str(Path(torch.__file__).parents[1])!r}); "
    result = run(python, "-c", borrow + IMPORT, cwd=elsewhere)
    assert result.returncode == 0, result.stderr
    file, available, reason = result.stdout.strip().split("|")
    return file, available, reason


def test_wheel_with_compiler(source: Path, tmp_path: Path) -> None:
    wheel, _ = build_wheel(source)
    assert wheel.name.split("-", 2)[2].startswith("py3-none-linux")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.rsplit("/", 1)[0] for name in names if name.endswith(".py")} == packages()
    assert {"pad_engine/libpad.so", "pad_engine/py.typed", "pad_engine/kernels/gumbel.py"} <= names
    assert not any(name.startswith(("kernels/", "tests/", "csrc/")) for name in names)
    file, available, reason = import_from_venv(tmp_path, wheel)
    assert (available, reason) == ("True", "")
    assert file.startswith(str(tmp_path / "venv"))
    # again over the same build folder, whose CMake cache names a ninja that is gone
    build_wheel(source)


def test_wheel_without_compiler(source: Path, no_compiler: dict[str, str], tmp_path: Path) -> None:
    (source / "pad_engine" / "libpad.so").write_bytes(b"left behind")
    wheel, printed = build_wheel(source, **no_compiler)
    assert wheel.name.endswith("py3-none-any.whl")
    assert "libpad was NOT built" in printed
    assert not any(name.endswith(".so") for name in zipfile.ZipFile(wheel).namelist())
    _, available, reason = import_from_venv(tmp_path, wheel)
    assert available == "False"
    assert "libpad is missing" in reason


def test_cuda_asked_for_without_toolkit_is_an_error(source: Path, tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", source / "wheels", ".")
    result = run(*pip, cwd=source, PAD_CUDA="1", CUDAToolkit_ROOT=str(tmp_path))
    assert result.returncode != 0
    assert "PAD_CUDA=1 asks for it" in result.stdout + result.stderr
    result = run(*pip, cwd=source, PAD_CUDA="yes")
    assert result.returncode != 0
    assert "PAD_CUDA must be 0 or 1" in result.stdout + result.stderr


def test_editable_install_maps_kernels(source: Path, tmp_path: Path) -> None:
    (source / "pad_engine" / "libpad.so").unlink(missing_ok=True)
    file, available, _ = import_from_venv(tmp_path, "-e", source)
    assert file == str(source / "kernels" / "gumbel.py")
    assert available == "True"
    assert (source / "pad_engine" / "libpad.so").is_file()


def test_source_distribution_builds(source: Path, tmp_path: Path) -> None:
    code = "from setuptools import build_meta; build_meta.build_sdist('out')"
    result = run(sys.executable, "-c", code, cwd=source, PYTHONSAFEPATH="0")
    assert result.returncode == 0, result.stderr
    result = run(sys.executable, "-m", "pip", "wheel", "--no-deps", *(source / "out").glob("*.tar.gz"), cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    wheel = next(tmp_path.glob("*.whl"))
    assert {"pad_engine/libpad.so", "pad_engine/kernels/gumbel.py"} <= set(zipfile.ZipFile(wheel).namelist())
