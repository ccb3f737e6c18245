"""What a relaxed rule needs on the device: buffers between LM head and accept kernel, thresholds, and a classifier's
weights.

Next to read: kernels/judge_nodes.py for the tail's first half, graphs.py for where it is queued.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from pad_engine.device_round import DeviceForest
from pad_engine.kernels.accept import MAX_ROWS, Relaxation
from pad_engine.kernels.judge_nodes import empty_judged, judge_nodes
from pad_engine.kernels.lm_head import Judging
from pad_engine.kernels.pivot_mlp import TailWeights, TapProjection
from pad_engine.kernels.row_stats import empty_parts
from pad_engine.rules.classifier import LINEAR_JUDGE, SCALARS, Classifier
from pad_engine.rules.override import Override

MAX_TAP_SPLIT = 8  # parts of the wide projection at most


class DeviceJudge:
    """An override's buffers for passes of up to MAX_ROWS rows. programs: of the LM head, by padded rows. dtype, hidden:
    of the tapped states.

    scalars: fp32 `[8]` on the device, thresholds and bounds (kernels/relaxed.py): they may change between rounds.
    """

    def __init__(
        self, override: Override, programs: Mapping[int, int], hidden: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.override, self.programs = override, programs
        self.scalars = torch.tensor(override.scalars, dtype=torch.float32, device=device)
        self.stats = empty_parts(max(programs.values()), MAX_ROWS, device)
        self.token_logit = torch.zeros(MAX_ROWS, device=device)
        self.judged = {rows: empty_judged(rows, device) for rows in programs}
        self.pick_score = torch.zeros(MAX_ROWS, device=device)
        self.pick_id = torch.zeros(MAX_ROWS, dtype=torch.int32, device=device)
        self.tap_layer: int | None = None
        self.weights: TailWeights | None = None
        if override.classifier is not None:
            self.tap_layer = override.classifier.tap_layer
            self.wide, self.weights = tail_weights(override.classifier.to(device))
            self.tap = torch.zeros(MAX_ROWS, hidden, dtype=dtype, device=device)
            self.tap_parts = torch.zeros(MAX_TAP_SPLIT * len(self.wide) * MAX_ROWS, device=device)

    def judging(self, rows: int, forest: DeviceForest) -> Judging:
        """What the LM head of a pass of so many rows leaves."""
        count = self.programs[rows]
        stats = self.stats.sized(count, rows)
        tap = None
        if self.weights is not None:
            units = len(self.wide)
            split = max(1, min(MAX_TAP_SPLIT, count // units))
            parts = self.tap_parts[: split * units * rows].view(split, units, rows)
            tap = TapProjection(self.tap[:rows], self.wide, parts)
        return Judging(stats, forest.token[:rows], forest.parent[:rows], self.token_logit[:rows], tap)

    def queue(
        self, rows: int, forest: DeviceForest, scores: Tensor, ids: Tensor, pdl: int
    ) -> tuple[Tensor, Tensor, Relaxation]:
        """Queue the tail's first half; returns the picks as one part for the accept kernel, and the relaxation."""
        judged, pick_score, pick_id = self.judged[rows], self.pick_score[None, :rows], self.pick_id[None, :rows]
        judge_nodes(self.judging(rows, forest), scores, ids, self.weights, judged, pick_score, pick_id, pdl)
        by_classifier = self.override.classifier is not None
        relaxation = Relaxation(self.override.kernel, by_classifier, judged.values, judged.ids, self.scalars)
        return pick_score, pick_id, relaxation


def tail_weights(classifier: Classifier) -> tuple[Tensor, TailWeights]:
    """The wide projection `[U, d]` and the rest of a classifier, as kernels take them. All stay fp32, whatever the type
    of the states: rounded weights would move pivot_prob by far more than the kernel does."""
    w = classifier.weights
    device = next(iter(w.values())).device
    if classifier.kind == LINEAR_JUDGE:
        nothing = torch.zeros(0, device=device)
        return w["weight"].contiguous(), TailWeights(w["bias"], *[nothing] * 6)
    scalars = torch.zeros(len(w["scalars.bias"]), len(SCALARS), device=device)
    for column, name in enumerate(classifier.scalars):
        scalars[:, SCALARS.index(name)] = w["scalars.weight"][:, column]
    out, bias = w["layer2.weight"], w["layer2.bias"]
    return w["hidden.weight"].contiguous(), TailWeights(
        w["hidden.bias"], scalars, w["scalars.bias"], w["layer1.weight"].contiguous(), w["layer1.bias"],
        (out[1] - out[0]).contiguous(), (bias[1:] - bias[:1]).contiguous(),
    )  # fmt: skip
