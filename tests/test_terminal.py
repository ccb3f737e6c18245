"""`pad` where the terminal is not as usual: a full disk, streams that are closed, Ctrl-C while torch is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_cli import MAIN, PROMPT
from tiny import Make

INTERRUPTED = 130


@pytest.fixture(scope="module")
def folder(make_model: Make) -> Path:
    return make_model("llama")


def run(folder: Path, redirection: str, prompt: str = PROMPT) -> subprocess.CompletedProcess[str]:
    """`pad generate` with a redirection of the shell's."""
    options = ["--model", str(folder), "--device", "cpu", "--max-tokens", "4", "--ignore-eos"]
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", *MAIN, "generate", prompt, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_error(folder: Path) -> None:
    result = run(folder, ">/dev/full")
    errors = [line for line in result.stderr.splitlines() if not line.startswith("memory: ")]
    assert result.returncode == 1 and len(errors) == 1, result.stderr
    assert errors[0].startswith("error: ") and "No space left on device" in errors[0]


def test_closed_streams_are_like_empty_ones(folder: Path) -> None:
    silent = run(folder, ">&-")
    assert (silent.returncode, silent.stdout) == (0, "") and "4 tokens in" in silent.stderr, silent.stderr
    asked = run(folder, "<&-", prompt="-")
    assert asked.returncode == 1 and "error: the prompt is empty" in asked.stderr, asked.stderr


SWALLOWS = "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt:\n    pass\n"


def test_ctrl_c_while_torch_is_imported_is_not_lost(tmp_path: Path) -> None:
    """By a package of that name that does what the real one does now and then."""
    (tmp_path / "torch.py").write_text(SWALLOWS)
    program = "from pad_engine.serving.terminal import catch_interrupts; catch_interrupts(); import torch; print('on')"
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=env)
    assert (result.returncode, result.stdout) == (INTERRUPTED, ""), result.stderr
