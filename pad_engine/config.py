"""Parameters of one request, and the `name:key=value` form in which drafters, trees and rules are named."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pad_engine.errors import RequestError

# Below this temperature the largest logit always wins in fp32, so it is treated as 0.
MIN_TEMPERATURE = 1e-5
MAX_TEMPERATURE = 1000.0


# the range in which OpenAI's interface has these two, and logit biases
MAX_PENALTY, MAX_BIAS = 2.0, 100.0
MAX_LOGPROBS = 20
MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class SamplingParams:
    """What one request asks for.

    max_tokens: new tokens at most, at least 1. min_tokens: no end of the answer before so many. temperature: 0 takes
    the likeliest token. seed: None draws a fresh one. top_k: 0 is off. top_p, min_p: 1 and 0 are off.
    repetition_penalty: 1 is off; looks at prompt and answer. presence_penalty, frequency_penalty: 0 is off; look at the
    answer. logit_bias: added to the logits of token ids. stop: texts that end the answer and are not part of it.
    stop_token_ids: tokens that end it, beside the model's own. ignore_eos: the model's own do not end it. logprobs: how
    many of the likeliest tokens to report at each position, with the chosen one; None reports nothing.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        whole = partial(check_number, self, int)
        number = partial(check_number, self, float)
        whole("max_tokens", 1, MAX_TOKENS)
        whole("min_tokens", 0, self.max_tokens)
        number("temperature", 0, MAX_TEMPERATURE)
        whole("top_k", 0, MAX_TOKENS)
        number("min_p", 0, 1)
        number("top_p", 0, 1)
        if self.top_p == 0:
            raise RequestError("top_p must be above 0 and at most 1, got 0", "temperature 0 takes the likeliest token")
        number("presence_penalty", -MAX_PENALTY, MAX_PENALTY)
        number("frequency_penalty", -MAX_PENALTY, MAX_PENALTY)
        number("repetition_penalty", 0.01, 10)
        if self.seed is not None:
            whole("seed", 0, 2**64 - 1)
        if self.logprobs is not None:
            whole("logprobs", 0, MAX_LOGPROBS)
        self._check_lists()

    def _check_lists(self) -> None:
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos must be True or False, got {self.ignore_eos!r}")
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, Sequence) or any(not isinstance(text, str) or not text for text in stop):
            raise RequestError(f"stop must be a text or texts, none of them empty, got {self.stop!r}")
        object.__setattr__(self, "stop", tuple(stop))
        ids = self.stop_token_ids
        if not isinstance(ids, Sequence) or any(not is_token(token) for token in ids):
            raise RequestError(f"stop_token_ids must be a list of token ids, got {ids!r}")
        object.__setattr__(self, "stop_token_ids", tuple(ids))
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")
        for token, bias in self.logit_bias.items():
            number = isinstance(bias, int | float) and not isinstance(bias, bool)
            if not is_token(token) or not number or not -MAX_BIAS <= bias <= MAX_BIAS:
                span = f"[-{MAX_BIAS:g}, {MAX_BIAS:g}]"
                raise RequestError(f"logit_bias must map token ids to numbers in {span}, got {token!r}: {bias!r}")

    @property
    def greedy(self) -> bool:
        """Whether the largest logit is always taken."""
        return self.temperature < MIN_TEMPERATURE

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """`stop` as it is after checking."""
        return tuple(self.stop)


def is_token(value: Any) -> bool:
    """Whether a value can be a token id."""
    return is_whole(value) and value >= 0


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number by its type; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_number(params: SamplingParams, kind: type, name: str, low: float, high: float) -> None:
    """RequestError unless a field is a number of the kind in [low, high]; NaN is in no range."""
    value = getattr(params, name)
    allowed = int if kind is int else int | float
    if isinstance(value, bool) or not isinstance(value, allowed) or not low <= value <= high:
        what = "a whole number" if kind is int else "a number"
        raise RequestError(f"{name} must be {what} in [{low}, {high}], got {value!r}")


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
    return int(take_number(values, key, default, what, low, high, int))


def take_float(values: dict[str, str], key: str, default: float, what: str, low: float, high: float) -> float:
    """The same for any number."""
    return take_number(values, key, default, what, low, high, float)


def take_number(
    values: dict[str, str], key: str, default: float, what: str, low: float, high: float, kind: type[int] | type[float]
) -> float:
    """Either of the two, by its kind."""
    noun, form = ("a whole number", "d") if kind is int else ("a number", "g")
    text: Any = values.pop(key, default)
    try:
        number = kind(text)
    except ValueError:
        raise RequestError(f"{what}: {key} must be {noun}, got {text!r}") from None
    if not low <= number <= high:
        raise RequestError(f"{what}: {key} must be in [{low:{form}}, {high:{form}}], got {number:{form}}")
    return number


def take_choice(values: dict[str, str], key: str, default: str, what: str, choices: Sequence[str]) -> str:
    """Remove one of a few words of a spec's values."""
    word = values.pop(key, default)
    if word not in choices:
        raise RequestError(f"{what}: {key} must be one of {', '.join(choices)}, got {word!r}")
    return word


def take_text(values: dict[str, str], key: str, what: str) -> str:
    """Remove a value that a spec must have."""
    if not values.get(key):
        raise RequestError(f"{what} needs {key}=...")
    return values.pop(key)


def refuse_rest(values: dict[str, str], what: str, known: str) -> None:
    """Complain about the values of a spec that nobody has taken."""
    if values:
        raise RequestError(f"{what}: unknown option {next(iter(values))!r}", f"known: {known}")
