"""What the controller makes of draft models whose drafts cost much, by a clock in place of a device: tokens a second
over plain decoding, of short and of longer answers.

    python bench/dear_drafts.py --out cpu

A plain step takes 1; the costs of rounds are those of pairs on an H200, and whether a drafted token is right is drawn,
as the case says. Rounds are planned one ahead of the one that is known, as on a device. No model is loaded.
"""

import argparse
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import harmonic_mean

import harness

from pad_engine.controller import CAPTURED_BUDGETS, MODEL_ACCEPTANCE, Controller, RoundPlan
from pad_engine.tree import DraftTree

REQUESTS, SEEDS, LENGTHS = 24, 4, (49, 128, 512)


@dataclass(frozen=True)
class Case:
    """verify: of a round's pass. step: of a drafted token. reading: of what plain rounds left unread, before a draft.
    depth: drafted tokens at most. right: how often a drafted token is right. wrong: of so many tokens (every) the first
    few are right so often instead (at_first). slow: how many times as long an engine's first draft of each size takes,
    as if the card had been asleep while it was compiled."""

    verify: float
    step: float
    reading: float
    depth: int
    right: float
    every: int = 16
    wrong: int = 0
    at_first: float = 0.0
    slow: float = 1.0


PAIR_8B, PAIR_1B = (1.16, 0.19, 0.05, 8), (1.28, 0.4, 0.2, 4)
CASES = {
    "8b + 1b, the first of 16 wrong": Case(*PAIR_8B, 0.95, wrong=1),
    "8b + 1b, the first two of 12 wrong": Case(*PAIR_8B, 0.96, every=12, wrong=2),
    "8b + 1b, the answer's first six wrong": Case(*PAIR_8B, 0.97, every=1000, wrong=6),
    "8b + 1b, mostly right": Case(*PAIR_8B, 0.97, wrong=1, at_first=0.8),
    "8b + 1b, mostly right, slow at first": Case(*PAIR_8B, 0.97, slow=5.0),
    "8b + 1b, mostly wrong": Case(*PAIR_8B, 0.1),
    "1b + 4 layers, mostly right": Case(*PAIR_1B, 0.88),
    "1b + 4 layers, the first of 20 wrong": Case(*PAIR_1B, 0.95, every=20, wrong=1),
    "1b + 4 layers, mostly wrong": Case(*PAIR_1B, 0.05),
}


def kept(case: Case, depth: int, emitted: int, draw: random.Random) -> int:
    """How many tokens of a draft are right."""
    for level in range(depth):
        at_first = (emitted + level) % case.every < case.wrong
        if draw.random() >= (case.at_first if at_first else case.right):
            return level
    return depth


def request_time(case: Case, controller: Controller, tokens: int, draw: random.Random, sizes: set[int]) -> float:
    """The time of an answer of so many tokens, from its first round on. sizes: of the engine's drafts so far."""
    controller.begin()
    time, emitted, unread, queued = 0.0, 0, False, deque[RoundPlan]()
    while emitted < tokens:
        while len(queued) < 2 and len(queued) < tokens - emitted:
            room = tokens - emitted - len(queued)
            queued.append(controller.decide(0, room, at_work=list(queued), readings=int(unread)))
            unread = not queued[-1].depth
        plan = queued.popleft()
        accepted = kept(case, min(plan.depth, tokens - emitted - 1), emitted, draw)
        cost = 1.0
        if plan.depth:
            cost = case.verify + case.step * plan.depth + case.reading * plan.readings
            cost *= 1.0 if plan.budget in sizes else case.slow
            sizes.add(plan.budget)
        tree = DraftTree.chain([0] * (plan.depth + 1))
        controller.observe(tree, accepted, accepted + 1, 0.0, cost, plan.budget, readings=plan.readings)
        time, emitted = time + cost, emitted + accepted + 1
    return time


def speeds(case: Case, tokens: int) -> Iterator[float]:
    """Tokens a plain step of every request of some engines."""
    for seed in range(SEEDS):
        draw, sizes = random.Random(seed), set[int]()
        controller = Controller(
            case.depth + 1, case.depth, budgets=CAPTURED_BUDGETS, prior=MODEL_ACCEPTANCE, everywhere=True
        )
        for _ in range(REQUESTS):
            yield tokens / request_time(case, controller, tokens, draw, sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", required=True, help="folder of results/, or a path")
    args = parser.parse_args()
    found = {}
    for name, case in CASES.items():
        by_length = {str(tokens): list(speeds(case, tokens)) for tokens in LENGTHS}
        over = {length: round(harmonic_mean(values), 3) for length, values in by_length.items()}
        least = {length: round(min(values), 3) for length, values in by_length.items()}
        found[name] = {**asdict(case), "over_plain": over, "least_of_a_request": least}
        print(name, over, least, flush=True)
    facts = {"requests": REQUESTS, "engines": SEEDS}
    print(harness.save("dear-drafts", {**facts, "cases": found}, args.out))


if __name__ == "__main__":
    main()
