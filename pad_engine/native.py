"""ctypes binding of libpad (csrc/include/pad.h). CPU tensors only; without the library the torch references serve.

Next files: native_accept.py, its part for the accepted path, and native_tail.py, for relaxed acceptance.
"""

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from pad_engine.errors import PadError

ABI_VERSION = 1  # PAD_ABI_VERSION of pad.h
ERROR_NONFINITE = 2  # PAD_ERROR_NONFINITE

_LIBRARY = Path(__file__).parent / "libpad.so"
_SIGNATURES = {
    "pad_gumbel": [c_uint64, c_uint32, c_uint32, c_uint32, c_uint32, c_size_t, POINTER(c_float)],
    "pad_gumbel_pick": [
        *(POINTER(c_float), c_size_t, c_size_t, c_size_t),
        *(POINTER(c_uint32), c_uint64, c_float, POINTER(c_int32)),
    ],
    # plain addresses cost less than typed pointers, and these are called once a round
    "pad_accept_match": [*[c_void_p] * 3, c_size_t, c_void_p],
    "pad_accept_bits": [*[c_void_p] * 3, c_size_t, c_void_p],
    "pad_accept_path": [*[c_void_p] * 4, c_size_t, c_size_t, *[c_void_p] * 2],
    "pad_match_path": [*[c_void_p] * 6, c_size_t, c_size_t, *[c_void_p] * 4],
    "pad_commit_list": [c_void_p, *[c_size_t] * 4, *[c_void_p] * 2],
    "pad_row_stats": [c_void_p, *[c_size_t] * 3, *[c_void_p] * 5],
    "pad_gather_judged": [*[c_void_p] * 5, *[c_size_t] * 2, *[c_void_p] * 2, c_size_t, *[c_void_p] * 5],
    "pad_pivot_mlp": [*[c_void_p] * 2, c_size_t, c_void_p, c_size_t, c_void_p],
    "pad_linear_judge": [c_void_p, c_float, c_void_p, *[c_size_t] * 3, c_void_p],
    "pad_relaxed_path": [*[c_void_p] * 8, *[c_size_t] * 2, *[c_void_p] * 6],
    "pad_rejection_path": [
        *(c_void_p, c_size_t, c_size_t, c_void_p, c_size_t, c_size_t, c_void_p, c_void_p, c_size_t),
        *(c_double, c_uint64, c_uint32, c_uint32, *[c_void_p] * 4),
    ],
}


class NativeError(PadError):
    """libpad refused a call or is not there; `status` is its pad_status, 0 where there was no call."""

    def __init__(self, message: str, hint: str = "", status: int = 0) -> None:
        super().__init__(message, hint)
        self.status = status


@cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    if not _LIBRARY.is_file():
        return None, "libpad is missing: the package was built without a C++ compiler"
    try:
        library = ctypes.CDLL(str(_LIBRARY))
        library.pad_abi_version.restype = c_uint32
        library.pad_version.restype = library.pad_last_error.restype = c_char_p
        if (found := library.pad_abi_version()) != ABI_VERSION:
            return None, f"libpad has ABI version {found}, this package needs {ABI_VERSION}: install it again"
        for name, argtypes in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = argtypes, c_int
    except (OSError, AttributeError) as error:
        return None, f"libpad cannot be loaded: {error}"
    return library, ""


def available() -> bool:
    """Whether libpad is there and of the right ABI version."""
    return _load()[0] is not None


def missing_reason() -> str:
    """Why libpad is not available, in one line; "" when it is."""
    return _load()[1]


def version() -> str:
    """The release that libpad was built as; "" without it."""
    library = _load()[0]
    return library.pad_version().decode() if library else ""


def call(name: str, *arguments: object) -> None:
    """Call a function of the header; its refusal becomes a NativeError with the library's text."""
    library, reason = _load()
    if library is None:
        raise NativeError(reason, "install a C++17 compiler, then run `pip install` again")
    status = getattr(library, name)(*arguments)
    # a row that is not finite is marked in the output, for whoever needs that row
    if status not in (0, ERROR_NONFINITE):
        raise NativeError(library.pad_last_error().decode(), status=status)


def _pointer(tensor: Tensor, ctype: type) -> object:
    return ctypes.cast(tensor.data_ptr(), POINTER(ctype))


def gumbel(
    seed: int, position: int, num_tokens: int, purpose: int = 0, round_index: int = 0, first_token: int = 0
) -> Tensor:
    """Gumbel noise, fp32 `[num_tokens]`, of token ids from first_token on: one row of kernels.gumbel.gumbel_ref."""
    words = {"position": position, "purpose": purpose, "round_index": round_index, "first_token": first_token}
    for name, word in words.items():
        if not 0 <= word < 2**32:
            raise ValueError(f"{name} must be in [0, 2^32), got {word}")
    out = torch.empty(num_tokens, dtype=torch.float32)
    seed %= 2**64
    call("pad_gumbel", seed, position, purpose, round_index, first_token, num_tokens, _pointer(out, c_float))
    return out


def gumbel_pick(logits: Tensor, positions: Tensor, seed: int, temperature: float) -> Tensor:
    """One draw a row from softmax(logits / temperature) by shared Gumbel noise; temperature 0 is the plain argmax.

    logits: fp32 `[R, V]` on the CPU, unit stride over V. positions: `[R]` integers, modulo 2^32; equal neighbours share
    the noise. seed: any int, modulo 2^64. Returns int32 `[R]`, -1 for a row with a NaN or without a finite best score.
    Raises ValueError for other tensors.
    """
    if logits.dim() != 2 or logits.dtype != torch.float32 or logits.device.type != "cpu" or logits.stride(1) != 1:
        raise ValueError(
            "logits must be [R, V] float32 on the CPU with unit stride over V, "
            f"got {tuple(logits.shape)} {logits.dtype} on {logits.device} with strides {logits.stride()}"
        )
    rows, vocab = logits.shape
    if positions.shape != (rows,) or positions.is_floating_point() or positions.device.type != "cpu":
        raise ValueError(f"positions must be [{rows}] integers on the CPU, got {tuple(positions.shape)}")
    # the low 32 bits, which C reads as unsigned
    words = positions.to(torch.int64).to(torch.int32).contiguous()
    out = torch.empty(rows, dtype=torch.int32)
    pointers = (_pointer(logits, c_float), _pointer(words, c_uint32), _pointer(out, c_int32))
    stride, seed = logits.stride(0), seed % 2**64
    call("pad_gumbel_pick", pointers[0], rows, vocab, stride, pointers[1], seed, temperature, pointers[2])
    return out
