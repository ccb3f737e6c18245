"""The binding of libpad: what it refuses, what it reports, and what happens without the library."""

import re
import threading
from pathlib import Path

import pytest
import torch

from pad_engine import native, sampling
from pad_engine.kernels import gumbel as kernel

ROOT = Path(__file__).parent.parent
HEADER = (ROOT / "csrc" / "include" / "pad.h").read_text()
needs_libpad = pytest.mark.skipif(not native.available(), reason=native.missing_reason())


@pytest.fixture
def without_libpad(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(native, "_LIBRARY", tmp_path / "libpad.so")
    native._load.cache_clear()
    yield tmp_path / "libpad.so"
    monkeypatch.undo()
    native._load.cache_clear()


def header_number(pattern: str) -> float:
    match = re.search(pattern, HEADER)
    assert match
    return float(match[1])


def test_constants_are_those_of_the_header() -> None:
    assert header_number(r"#define PAD_ABI_VERSION (\d+)") == native.ABI_VERSION
    assert header_number(r"PAD_ERROR_NONFINITE = (\d+)") == native.ERROR_NONFINITE
    assert header_number(r"#define PAD_MAX_TEMPERATURE (\S+)f") == kernel.MAX_TEMPERATURE
    for name in ("GUMBEL", "ACCEPT", "RESIDUAL", "DRAFT"):
        assert header_number(rf"PAD_PURPOSE_{name} = (\d+)") == getattr(kernel, name)
    for name in native._SIGNATURES:
        assert f"{name}(" in HEADER


@needs_libpad
def test_library_is_of_this_release() -> None:
    assert native.missing_reason() == ""
    assert f'version = "{native.version()}"' in (ROOT / "pyproject.toml").read_text()


@needs_libpad
def test_pick_reads_strided_rows_and_any_integer_positions() -> None:
    wide = torch.randn(6, 1000)
    positions = torch.tensor([3, 3, 4, 4, 5, 5])
    expected = native.gumbel_pick(wide[::2, 100:900].contiguous(), positions[::2], 8, 0.9)
    assert expected.dtype == torch.int32
    for dtype in (torch.uint8, torch.int32, torch.int64):
        assert torch.equal(native.gumbel_pick(wide[::2, 100:900], positions[::2].to(dtype), 8, 0.9), expected)
    assert native.gumbel_pick(torch.empty(0, 5), torch.empty(0, dtype=torch.int64), 8, 0.9).shape == (0,)
    assert torch.equal(
        native.gumbel_pick(wide[:1].expand(6, -1), positions, 8, 0.9)[::2],
        native.gumbel_pick(wide[:1].expand(3, -1).contiguous(), positions[::2], 8, 0.9),
    )


@needs_libpad
@pytest.mark.parametrize(
    ("logits", "positions"),
    [
        (torch.zeros(4), torch.arange(4)),
        (torch.zeros(2, 4, dtype=torch.float64), torch.arange(2)),
        (torch.zeros(2, 4, dtype=torch.bfloat16), torch.arange(2)),
        (torch.zeros(4, 2).T, torch.arange(2)),
        (torch.zeros(2, 4, device="meta"), torch.arange(2)),
        (torch.zeros(2, 4), torch.arange(3)),
        (torch.zeros(2, 4), torch.zeros(2)),
        (torch.zeros(2, 4), torch.arange(2, device="meta")),
    ],
)
def test_pick_refuses_other_tensors(logits: torch.Tensor, positions: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="must be"):
        native.gumbel_pick(logits, positions, 0, 1.0)


@needs_libpad
def test_library_refusals_carry_its_text_and_status() -> None:
    with pytest.raises(native.NativeError, match="vocab must be in") as caught:
        native.gumbel_pick(torch.empty(1, 0), torch.tensor([0]), 0, 1.0)
    assert caught.value.status == 1
    with pytest.raises(ValueError, match="position must be in"):
        native.gumbel(0, -1, 4)
    with pytest.raises(native.NativeError, match="first_token 4294967295"):
        native.gumbel(0, 0, 2, first_token=2**32 - 1)


@needs_libpad
def test_errors_of_threads_stay_apart() -> None:
    texts: dict[int, str] = {}

    def fail_in_row(row: int) -> None:
        refused = torch.zeros(row + 1, 8)
        for _ in range(200):
            with pytest.raises(native.NativeError) as caught:
                native.gumbel_pick(refused, torch.arange(row + 1), 0, -1.0 - row)
            texts[row] = str(caught.value)

    threads = [threading.Thread(target=fail_in_row, args=(row,)) for row in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [f"-{row + 1}" in texts[row] for row in range(4)] == [True] * 4


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_sampling_marks_the_row_with_and_without_libpad(value: float, request: pytest.FixtureRequest) -> None:
    logits = torch.zeros(5, 300)
    logits[3, 299] = value
    picks = []
    for fixture in (None, "without_libpad"):
        if fixture:
            request.getfixturevalue(fixture)
        picks.append(sampling.gumbel_pick(logits, torch.arange(5), 0, 1.0).tolist())
    assert picks[0] == picks[1]
    assert [pick < 0 for pick in picks[0]] == [False, False, False, True, False]


def test_sampling_is_the_same_without_libpad(request: pytest.FixtureRequest) -> None:
    logits, positions, cpu = torch.randn(9, 700), torch.arange(9) // 2, torch.device("cpu")
    picks = sampling.gumbel_pick(logits, positions, 5, 0.8)
    transposed = sampling.gumbel_pick(logits.T.contiguous().T, positions, 5, 0.8)
    noise = torch.stack([sampling.gumbel_noise(5, position, 700, cpu) for position in positions.tolist()])
    request.getfixturevalue("without_libpad")
    assert not native.available()
    assert torch.equal(noise[-1], sampling.gumbel_noise(5, 4, 700, cpu))
    assert torch.equal(picks, sampling.gumbel_pick(logits, positions, 5, 0.8))
    assert torch.equal(picks, transposed)
    # a drafter with the same logits picks the same token
    assert torch.equal(picks, (logits + 0.8 * noise).argmax(-1).int())


def test_missing_library_is_explained(without_libpad: Path) -> None:
    assert "without a C++ compiler" in native.missing_reason()
    assert native.version() == ""
    with pytest.raises(native.NativeError, match="libpad is missing"):
        native.gumbel(0, 0, 4)


def test_broken_library_is_explained(without_libpad: Path) -> None:
    without_libpad.write_bytes(b"not a library")
    assert native.missing_reason().startswith("libpad cannot be loaded")


@needs_libpad
def test_other_abi_version_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "ABI_VERSION", native.ABI_VERSION + 1)
    native._load.cache_clear()
    assert "ABI version" in native.missing_reason()
    monkeypatch.undo()
    native._load.cache_clear()
