"""Classifiers of drafted tokens, and the files that they live in: NAME.safetensors with NAME.json beside it.

`pivot-mlp` is PAD's classifier (arXiv 2511.00351, the released "extended_v2"): the token's own hidden state projected
to 64, the scalars of its judging row to 16, then 128 hidden units and two classes. `linear-judge` is a linear head on
the hidden state (arXiv 2501.19309). Both run in fp32.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pad_engine.errors import ModelError

PIVOT_MLP, LINEAR_JUDGE = "pivot-mlp", "linear-judge"
SCALARS = ("entropy", "probability", "margin")  # that a checkpoint may name
HIDDEN, SCALAR, INNER = 64, 16, 128  # units


@dataclass(frozen=True)
class Classifier:
    """kind: PIVOT_MLP or LINEAR_JUDGE. tap_layer: the state after this block, before the final norm, is its input.
    scalars: names of SCALARS in the order of the weights. weights: fp32, by the names in `expected_shapes`. target: the
    model that it was trained for."""

    kind: str
    tap_layer: int
    hidden_size: int
    scalars: tuple[str, ...]
    weights: dict[str, Tensor]
    target: str = ""

    def pivot_prob(self, hidden: Tensor, features: Mapping[str, Tensor]) -> Tensor:
        """fp32 `[N]`: how likely each token changes the result. hidden: `[N, d]` of the tokens' own rows; features:
        fp32 `[N]` each, of the rows that judge them."""
        w, h = self.to(hidden.device).weights, hidden.float()
        if self.kind == LINEAR_JUDGE:
            return 1.0 - torch.sigmoid(h @ w["weight"][0] + w["bias"])
        x = torch.stack([features[name] for name in self.scalars], dim=1)
        projected = torch.cat((h @ w["hidden.weight"].t() + w["hidden.bias"], scalar_units(w, x)), dim=1)
        z = (projected @ w["layer1.weight"].t() + w["layer1.bias"]).relu()
        return (z @ w["layer2.weight"].t() + w["layer2.bias"]).softmax(-1)[:, 1]

    def to(self, device: torch.device) -> "Classifier":
        """The same with its weights on a device."""
        if all(weight.device == device for weight in self.weights.values()):
            return self
        weights = {name: weight.to(device) for name, weight in self.weights.items()}
        return Classifier(self.kind, self.tap_layer, self.hidden_size, self.scalars, weights, self.target)

    def save(self, path: Path, **more: Any) -> None:
        """Write path (.safetensors) and its .json, with `more` in the latter."""
        save_file(self.weights, path)
        facts = {
            "kind": self.kind, "target": self.target, "hidden_size": self.hidden_size, "tap_layer": self.tap_layer,
            "scalars": list(self.scalars),
        }  # fmt: skip
        path.with_suffix(".json").write_text(json.dumps(facts | more, indent=1) + "\n", encoding="utf-8")


def scalar_units(weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """`[N, 16]` of scalars `[N, S]`."""
    return x @ weights["scalars.weight"].t() + weights["scalars.bias"]


def expected_shapes(kind: str, hidden_size: int, num_scalars: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a kind."""
    if kind == LINEAR_JUDGE:
        return {"weight": (1, hidden_size), "bias": (1,)}
    layers = {
        "hidden": (HIDDEN, hidden_size), "scalars": (SCALAR, num_scalars), "layer1": (INNER, HIDDEN + SCALAR),
        "layer2": (2, INNER),
    }  # fmt: skip
    weights = {f"{name}.weight": shape for name, shape in layers.items()}
    return weights | {f"{name}.bias": shape[:1] for name, shape in layers.items()}


def load_classifier(path: str | Path, kind: str) -> Classifier:
    """Read a classifier of the kind; ModelError names what is missing or has another shape."""
    path = Path(path).expanduser()
    try:
        facts = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        weights = {name: tensor.float() for name, tensor in load_file(path).items()}
        found, layer, size = facts["kind"], int(facts["tap_layer"]), int(facts["hidden_size"])
        scalars = tuple(str(name) for name in facts.get("scalars", ()))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ModelError(
            f"the classifier {path} cannot be read: {error!r}", "it is a .safetensors file with a .json beside it"
        ) from error
    if found != kind:
        raise ModelError(f"the classifier {path} is of kind {found!r}, and this rule needs {kind}")
    if unknown := set(scalars) - set(SCALARS):
        raise ModelError(
            f"the classifier {path} names unknown scalars {sorted(unknown)}", f"known: {', '.join(SCALARS)}"
        )
    expected = expected_shapes(kind, size, len(scalars))
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if shapes != expected:
        raise ModelError(f"the classifier {path} has tensors {shapes}, expected {expected}")
    return Classifier(kind, layer, size, scalars, weights, str(facts.get("target", "")))
