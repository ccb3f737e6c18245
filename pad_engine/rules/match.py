"""Sampling that does not depend on speculation: target and drafter draw with the same Gumbel noise.

The target's pick after a context is argmax(logits / T + G[seed, position, token]), a sample from softmax(logits / T)
(Gumbel 1954; Maddison et al. 2014). A node stays iff it is that pick, so the emitted token depends on the context and
the noise alone, and the output equals plain sampling with the same seed for every drafter, tree and budget.
"""

from pad_engine.rules.greedy import judge_pick
from pad_engine.rules.rule import AcceptanceRule

MATCH = AcceptanceRule("match", judge_pick, end="sample", lossless=True)
