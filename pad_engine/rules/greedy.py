"""A node stays iff it is the target's most likely token: the output is plain greedy decoding, id for id."""

import torch
from torch import Tensor

from pad_engine.record import Record
from pad_engine.rules.rule import AcceptanceRule


def judge_pick(record: Record) -> tuple[Tensor, Tensor]:
    """Accept what the target itself picked; all scores are equal, so of twins the first stays."""
    accept = record.token == record.judge_pick
    return accept, torch.zeros(accept.shape)


GREEDY = AcceptanceRule("greedy", judge_pick, end="argmax", lossless=True)
