"""Measured costs that outlive the process, by card and model, so that a first request need not measure them anew.

A cache and nothing more: what cannot be read or written is done without. Costs that a file brings are believed, and
count as one sample each, so what a process measures itself soon replaces them.
"""

import contextlib
import hashlib
import json
import math

import torch

from pad_engine.controller import FEW, Controller, Cost
from pad_engine.errors import RequestError
from pad_engine.files import write_file
from pad_engine.kernels.tuning import card_name
from pad_engine.models.cache import cache_root

CHANGED = 0.1  # of a cost, before a file is written again


class CostFile:
    """The costs of one way of decoding. parts: whatever they depend on, apart from the card, as text."""

    def __init__(self, device: torch.device, parts: list[str]) -> None:
        name = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]
        self.path = cache_root() / "costs" / card_name(device) / f"{name}.json"
        self.saved: dict[str, float] = {}

    def load(self, controller: Controller) -> None:
        """Tell a controller what the file says, if there is one and it makes sense."""
        try:
            costs = {name: float(value) for name, value in json.loads(self.path.read_text(encoding="utf-8")).items()}
            rows = {int(name): value for name, value in costs.items() if name not in named(controller)}
        except (OSError, ValueError, AttributeError, TypeError):
            return
        if not all(math.isfinite(value) and value >= 0 for value in costs.values()) or min(rows, default=1) < 1:
            return
        self.saved = costs
        for count, milliseconds in rows.items():
            controller.verify_cost.add(count, milliseconds, FEW)
        for name, cost in named(controller).items():
            if name in costs:
                cost.add(costs[name], FEW)

    def save(self, controller: Controller) -> None:
        """Write what a controller has measured, if it says something new."""
        costs = {str(rows): controller.verify_cost(rows) for rows in controller.verify_cost.samples}
        costs |= {name: cost.milliseconds for name, cost in named(controller).items() if cost.samples}
        if all(name in self.saved and close(value, self.saved[name]) for name, value in costs.items()):
            return
        costs = self.saved | costs
        with contextlib.suppress(OSError, RequestError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_file(self.path, (json.dumps(costs) + "\n").encode())
        self.saved = costs


def named(controller: Controller) -> dict[str, Cost]:
    """The costs that are not of a number of rows, by their names in a file."""
    return {"draft": controller.draft_cost.token, "read": controller.read_cost}


def close(value: float, saved: float) -> bool:
    """Whether a cost is about what it was."""
    return abs(value - saved) <= CHANGED * max(value, saved)
