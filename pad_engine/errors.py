"""The errors that users see: one line that names the input and what was expected, and a hint where there is one."""


class PadError(Exception):
    """A fault of the input, the model or the machine. `str()` is one line; `hint` says what to do about it."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class ModelError(PadError):
    """The model cannot be found, fetched, read or run by this engine."""


class NonFiniteError(PadError):
    """The model's logits hold a NaN or an infinity where a token must be picked. seq: of the sequence, among many."""

    def __init__(self, message: str, hint: str = "", seq: int = 0) -> None:
        super().__init__(message, hint)
        self.seq = seq


class RequestError(PadError, ValueError):
    """The request (prompt, parameters) is not one that can be served."""
