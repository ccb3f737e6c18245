"""Fit a classifier's weights to labelled tokens.

Inputs are standardised for the optimiser, and that is folded into the first layer afterwards, so that a checkpoint
takes raw states and raw scalars, as the kernels do. Next to read: pivot.py, which chooses and compares.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pad_engine.errors import RequestError
from pad_engine.rules.classifier import INNER, LINEAR_JUDGE, PIVOT_MLP, SCALAR, SCALARS, expected_shapes

RESOLVED = 2.0**-8  # of a number, what bf16 states tell of it
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Settings:
    """What a run may choose.

    kind, scalars: of the classifier (rules/classifier.py); a linear judge looks at no scalars. epochs: at most;
    `patience` of them without a lower validation loss end the run, and the weights of the lowest stay. rate, batch,
    decay: of AdamW (the paper: 2000 epochs at 1e-5 on one batch of all tokens, without standardising). seed: of the
    split, the first weights and the order of tokens. pivot_utility: see pivot.clear.
    """

    kind: str = PIVOT_MLP
    scalars: tuple[str, ...] = ("entropy", "probability")
    epochs: int = 200
    patience: int = 20
    rate: float = 3e-4
    batch: int = 512
    decay: float = 0.01
    seed: int = 0
    pivot_utility: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in (PIVOT_MLP, LINEAR_JUDGE):
            raise RequestError(f"kind must be {PIVOT_MLP} or {LINEAR_JUDGE}, got {self.kind!r}")
        if not self.scalars or len(set(self.scalars)) < len(self.scalars) or set(self.scalars) - set(SCALARS):
            raise RequestError(f"scalars must be some of {', '.join(SCALARS)}, got {','.join(self.scalars)!r}")
        if self.epochs < 1:
            raise RequestError(f"epochs must be at least 1, got {self.epochs}")


@dataclass(frozen=True)
class Inputs:
    """Of N tokens, on one device, fp32. hidden: `[N, d]`, or None for the MLP without it. scalars: `[N, S]`."""

    hidden: Tensor | None
    scalars: Tensor

    def at(self, rows: Tensor) -> "Inputs":
        """Some of them."""
        return Inputs(None if self.hidden is None else self.hidden[rows], self.scalars[rows])


@dataclass(frozen=True)
class Scale:
    """Mean and spread of the columns of a `[N, D]`, fp64 `[D]`."""

    mean: Tensor
    spread: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """The columns standardised, fp32."""
        return ((x.double() - self.mean) / self.spread).float()

    def fold(self, weights: Weights, layer: str) -> Weights:
        """The same weights, with a layer on standardised columns as one on raw columns."""
        weight = weights[f"{layer}weight"].double() / self.spread
        bias = weights[f"{layer}bias"].double() - weight @ self.mean
        return weights | {f"{layer}weight": weight.float(), f"{layer}bias": bias.float()}


@dataclass(frozen=True)
class Epoch:
    """Losses of one pass over the training tokens: their mean along it, and the validation tokens' after it."""

    epoch: int
    train_loss: float
    validation_loss: float


@dataclass(frozen=True)
class Fitted:
    """weights: on raw inputs. curve: every epoch. best: the epoch whose weights these are."""

    weights: Weights
    curve: list[Epoch]
    best: int


def fit(inputs: Inputs, pivot: Tensor, train: Tensor, validation: Tensor, settings: Settings) -> Fitted:
    """Minimise the cross entropy of the training rows, both classes weighing the same, until that of the validation
    rows stops falling. pivot: bool `[N]` on the inputs' device; train, validation: int64 rows."""
    scales = {"scalars.": scale_of(inputs.scalars[train])}
    if inputs.hidden is not None:
        scales["hidden."] = scale_of(inputs.hidden[train])
    hidden = None if inputs.hidden is None else scales["hidden."].apply(inputs.hidden)
    standard = Inputs(hidden, scales["scalars."].apply(inputs.scalars))
    weights, curve, best = descend(standard, pivot, train, validation, settings)
    if settings.kind == LINEAR_JUDGE:
        return Fitted(scales["hidden."].fold(weights, ""), curve, best)
    for layer, scale in scales.items():
        weights = scale.fold(weights, layer)
    return Fitted(weights, curve, best)


def descend(
    inputs: Inputs, pivot: Tensor, train: Tensor, validation: Tensor, settings: Settings
) -> tuple[Weights, list[Epoch], int]:
    """The same on standardised inputs: weights, every epoch, and the epoch that the weights are of."""
    generator = torch.Generator().manual_seed(settings.seed)
    weights = first_weights(settings.kind, inputs, generator)
    kept, curve, best = weights, list[Epoch](), 0
    optimizer = torch.optim.AdamW(weights.values(), settings.rate, weight_decay=settings.decay)
    balance = class_weights(pivot[train])
    for epoch in range(1, settings.epochs + 1):
        total = torch.zeros((), device=pivot.device)
        for part in torch.randperm(len(train), generator=generator).split(settings.batch):
            rows = train[part.to(train.device)]
            value = loss(weights, inputs.at(rows), pivot[rows], balance)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            total += value.detach() * len(part)
        with torch.no_grad():
            after = float(loss(weights, inputs.at(validation), pivot[validation], balance))
        curve.append(Epoch(epoch, float(total) / len(train), after))
        if not best or after < curve[best - 1].validation_loss:
            best, kept = epoch, {name: weight.detach().clone() for name, weight in weights.items()}
        elif epoch - best >= settings.patience:
            break
    return kept, curve, best


def scale_of(x: Tensor) -> Scale:
    """Of the columns of a `[N, D]`. A spread below what bf16 resolves beside the mean is noise, and is not blown up."""
    mean, variance = x.double().mean(0), x.double().var(0, correction=0)
    spread = (variance + (RESOLVED * mean) ** 2).sqrt()
    return Scale(mean, torch.where(spread > 0, spread, 1.0))


def first_weights(kind: str, inputs: Inputs, generator: torch.Generator) -> Weights:
    """As torch.nn.Linear begins, by the checkpoint's names; without states the MLP has its scalar part alone."""
    width = 0 if inputs.hidden is None else inputs.hidden.shape[1]
    shapes = expected_shapes(kind, width, inputs.scalars.shape[1])
    if inputs.hidden is None:
        shapes = {name: shape for name, shape in shapes.items() if not name.startswith("hidden.")}
        shapes["layer1.weight"] = (INNER, SCALAR)
    weights = {}
    for name, shape in shapes.items():
        fan_in = shapes[name.replace("bias", "weight")][1]
        drawn = (2 * torch.rand(shape, generator=generator) - 1) / fan_in**0.5
        weights[name] = drawn.to(inputs.scalars.device).requires_grad_()
    return weights


def log_odds(weights: Weights, inputs: Inputs) -> Tensor:
    """fp32 `[N]`: log of pivot over harmless. Its sigmoid is Classifier.pivot_prob."""
    if "weight" in weights:
        assert inputs.hidden is not None
        return -F.linear(inputs.hidden, weights["weight"], weights["bias"])[:, 0]

    def layer(name: str, x: Tensor) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    parts = [] if inputs.hidden is None else [layer("hidden", inputs.hidden)]
    z = layer("layer1", torch.cat([*parts, layer("scalars", inputs.scalars)], 1)).relu()
    classes = layer("layer2", z)
    return classes[:, 1] - classes[:, 0]


def class_weights(pivot: Tensor) -> Tensor:
    """fp32 `[2]`: of harmless tokens and of pivots, so that both classes weigh the same and a token 1 on average."""
    counts = torch.bincount(pivot.long(), minlength=2)
    return len(pivot) / (2.0 * counts)


def loss(weights: Weights, inputs: Inputs, pivot: Tensor, balance: Tensor) -> Tensor:
    """Weighted cross entropy, a weighted mean."""
    each = balance[pivot.long()]
    odds = log_odds(weights, inputs)
    return F.binary_cross_entropy_with_logits(odds, pivot.float(), each, reduction="sum") / each.sum()
