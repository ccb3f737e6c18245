"""Settings of rules: which option of a rule makes it looser, and the specs that a command line names.

Next to read: evaluate.py.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from pad_engine.config import parse_spec
from pad_engine.errors import RequestError

TARGET, DRAFT, GREEDY = "target", "draft", "greedy"  # settings that every evaluation has
DIRECT = "direct "  # before the name of a rule that is followed without speculation


@dataclass(frozen=True)
class Sweep:
    """The option of a rule that makes it looser, and its values from strict to loose."""

    option: str
    values: tuple[float, ...]

    @property
    def rising(self) -> bool:
        """Whether larger values are looser."""
        return self.values[0] < self.values[-1]


STEPS = (0.05, *(step / 10 for step in range(1, 10)), 0.95)
SWEEPS = {
    "pivot": Sweep("sigma", STEPS),
    "judge": Sweep("delta", STEPS[::-1]),
    "margin": Sweep("theta", (0.98, 0.95, *STEPS[9:4:-1])),
    "margin ratio": Sweep("rho", STEPS[::-1]),
    "margin gap": Sweep("m", STEPS),
    "typical": Sweep("eps", (0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01)),
    "topk": Sweep("k", (2, 3, 4, 6, 8)),
    "fly": Sweep("theta", (0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.0)),
    "entropy": Sweep("h", (4.0, 3.0, 2.0, 1.5, 1.0, 0.7, 0.5, 0.3, 0.1)),
    "kl": Sweep("t", (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 4.0)),
    "random": Sweep("rate", STEPS),
}  # fmt: skip


def find_sweep(name: str, form: str) -> Sweep | None:
    """The sweep of a rule by its name and form, if one of its options orders it."""
    return None if form == "released" else SWEEPS.get(f"{name} {form}", SWEEPS.get(name))


def sweep_of(spec: str) -> Sweep:
    """The sweep of the rule that a spec names. RequestError if it has none."""
    name, values = parse_spec(spec, "rule")
    sweep = find_sweep(name, values.get("form", ""))
    if sweep is None:
        known = ", ".join(dict.fromkeys(key.split()[0] for key in SWEEPS))
        raise RequestError(f"rule {spec!r} has no settings from strict to loose", f"rules that have some: {known}")
    return sweep


def ordered(sweep: Sweep, text: str | None) -> tuple[float, ...]:
    """Values to test from strict to loose: those of a comma-separated text, or the sweep's own."""
    if text is None:
        return sweep.values
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise RequestError(f"--settings must be numbers with commas between them, got {text!r}") from None
    if len(set(values)) < len(values) or not all(map(math.isfinite, values)):
        raise RequestError(f"--settings must be different finite numbers, got {text!r}")
    return tuple(sorted(values, reverse=not sweep.rising))


def with_setting(spec: str, option: str, value: float) -> str:
    """The spec of a rule with one more option."""
    return f"{spec}{',' if ':' in spec else ':'}{option}={value:.12g}"


def families(specs: Sequence[str]) -> dict[str, list[str]]:
    """Specs that differ in the option that orders their rule's settings alone, strict to loose, by what they share. A
    rule without such an option is a family of its own."""
    found: dict[str, list[tuple[float, str]]] = {}
    for spec in specs:
        name, values = parse_spec(spec, "rule")
        sweep = find_sweep(name, values.get("form", ""))
        if sweep is None or sweep.option not in values:
            found[f"{spec} (as it is)"] = [(0.0, spec)]
            continue
        value = float(values.pop(sweep.option))
        shared = ",".join(f"{key}={text}" for key, text in values.items())
        member = (value if sweep.rising else -value, spec)
        found.setdefault(f"{name}:{shared}" if shared else name, []).append(member)
    return {name: [spec for _, spec in sorted(members)] for name, members in found.items()}


def named(text: str) -> list[str]:
    """The specs of `rule; rule; ...`, in which an option may have several values: `pivot:model=F,sigma=0.1|0.3`."""
    specs = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, colon, rest = part.partition(":")
        options = [[f"{key}{equals}{value}" for value in values.split("|")] for key, equals, values in
                   (option.partition("=") for option in rest.split(","))]  # fmt: skip
        specs += [f"{name}{colon}{','.join(chosen)}" for chosen in itertools.product(*options)]
    if not specs:
        raise RequestError(f"--rules names no rule, got {text!r}")
    if twice := [spec for spec in specs if specs.count(spec) > 1]:
        raise RequestError(f"--rules names {twice[0]} twice")
    return specs
