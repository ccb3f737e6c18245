"""The accepted path of each sequence and the token after it: by libpad on the CPU, else by the torch reference.

Next to read: kernels/accept.py for the meaning, csrc/cpu/accept.cpp for the loops.
"""

import math

import torch
from torch import Tensor

from pad_engine import native, native_accept
from pad_engine.kernels.accept import accept_bits_ref, accept_path_ref
from pad_engine.record import Record
from pad_engine.rules.greedy import judge_pick
from pad_engine.rules.rule import AcceptanceRule
from pad_engine.tree import Forest


def accept_paths(record: Record, rule: AcceptanceRule) -> tuple[list[list[int]], list[int]]:
    """For each sequence of the forest its path, as rows of the forest from the root on, and the token after it."""
    f = record.forest
    if rule.judge is judge_pick and native.available():
        return native_accept.match_path(
            f.token, f.parent, record.row_pick, f.tree_mask_bits, f.depth, f.seq, len(f.starts)
        )
    judged, score = rule.judge(record)
    paths = judged_paths(f, judged.cpu(), score.float().cpu())
    ends = record.row_pick.tolist()
    return paths, [ends[path[-1]] for path in paths]


def judged_paths(forest: Forest, judged: Tensor, score: Tensor) -> list[list[int]]:
    """The paths from a rule's judgements, bool `[N]`, and scores, fp32 `[N]`. A NaN score is below any other."""
    if native.available():
        kept = native_accept.accept_bits(judged.contiguous(), score.contiguous(), forest.parent)
        return native_accept.accept_path(forest.tree_mask_bits, kept, forest.depth, forest.seq, len(forest.starts))
    lowest = torch.finfo(score.dtype).min
    score = score.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=lowest)
    kept = accept_bits_ref(judged, score, forest.parent)
    return accept_path_ref(kept, forest.depth, forest.seq, forest.tree_mask_bits)
