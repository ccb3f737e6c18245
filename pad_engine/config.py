"""Parameters of one request, and the `name:key=value` form in which drafters, trees and rules are named."""

from dataclasses import dataclass
from typing import Any

from pad_engine.errors import RequestError

# Below this temperature the largest logit always wins in fp32, so it is treated as 0.
MIN_TEMPERATURE = 1e-5
MAX_TEMPERATURE = 1000.0


@dataclass(frozen=True)
class SamplingParams:
    """max_tokens: new tokens at most, at least 1. temperature: 0 is greedy. seed: None draws a fresh one.
    ignore_eos: go on after an end-of-sequence token (benchmarks)."""

    max_tokens: int = 256
    temperature: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.max_tokens, int) or isinstance(self.max_tokens, bool) or self.max_tokens < 1:
            raise RequestError(f"max_tokens must be a whole number of at least 1, got {self.max_tokens!r}")
        if not isinstance(self.temperature, int | float) or not 0 <= self.temperature <= MAX_TEMPERATURE:
            raise RequestError(f"temperature must be in [0, {MAX_TEMPERATURE:g}], got {self.temperature!r}")
        whole = isinstance(self.seed, int) and not isinstance(self.seed, bool)
        if self.seed is not None and not (whole and 0 <= self.seed < 2**64):
            raise RequestError(f"seed must be a whole number in [0, 2^64), got {self.seed!r}")

    @property
    def greedy(self) -> bool:
        """Whether the largest logit is always taken."""
        return self.temperature < MIN_TEMPERATURE


def parse_spec(spec: str, what: str) -> tuple[str, dict[str, str]]:
    """`name:key=value,key=value` to (name, values). A part without `=` belongs to the value before it, so that lists
    can be written: `self:drop=3,4` gives {"drop": "3,4"}."""
    name, _, rest = spec.partition(":")
    values: dict[str, str] = {}
    last = ""
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if equals:
            last = key.strip()
            values[last] = value.strip()
        elif last:
            values[last] += f",{part.strip()}"
        else:
            raise RequestError(f"{what} {spec!r}: expected name:key=value,..., got {part!r}")
    return name.strip(), values


def take_int(values: dict[str, str], key: str, default: int, what: str, low: int = 1, high: int = 64) -> int:
    """Remove an integer of a spec's values and check its range."""
    text: Any = values.pop(key, default)
    try:
        number = int(text)
    except ValueError:
        raise RequestError(f"{what}: {key} must be a whole number, got {text!r}") from None
    if not low <= number <= high:
        raise RequestError(f"{what}: {key} must be in [{low}, {high}], got {number}")
    return number


def refuse_rest(values: dict[str, str], what: str, known: str) -> None:
    """Complain about the values of a spec that nobody has taken."""
    if values:
        raise RequestError(f"{what}: unknown option {next(iter(values))!r}", f"known: {known}")
