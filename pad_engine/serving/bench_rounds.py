"""The second table of `pad bench`: what rounds of a fixed number of nodes cost and give, by temperature.

Times are the engine's own: of drafting, of verifying with all that follows, and of whole requests; a draft on a GPU is
part of its round, and counts as verifying. The host's share is what is left of a request's time without them; on a GPU,
where rounds are queued ahead, without what the card needs for the same rounds when nobody reads them.
Next to read: bench.py.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pad_engine.config import SamplingParams
from pad_engine.errors import RequestError

if TYPE_CHECKING:
    from rich.table import Table

    from pad_engine.captured import Played
    from pad_engine.engine import Engine

Number = TypeVar("Number", int, float)
CARD_ROUNDS, CARD_WARM = 20, 3  # that are queued back to back, and ahead of them


@dataclass
class Sums:
    """Of the requests of one row, in milliseconds and tokens. nodes: rounds by their number of nodes. card_ms: of these
    rounds on a GPU, None without one."""

    decode_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    nodes: Counter[int] = field(default_factory=Counter)
    card_ms: float | None = None

    def add(self, played: "Played") -> None:
        """Count a round."""
        self.draft_ms += played.draft_ms
        self.verify_ms += played.verify_ms
        self.rounds += 1
        self.tokens += len(played.commit.tokens)
        self.drafted += len(played.commit.tree) - 1
        self.nodes[played.rows or len(played.commit.tree)] += 1

    def row(self, temperature: float, budget: int) -> dict[str, Any]:
        """Means of a round, and the host's share."""
        busy = self.draft_ms + self.verify_ms if self.card_ms is None else self.card_ms
        return {
            "temperature": temperature,
            "budget": budget,
            "tokens_per_second": 1000 * self.tokens / self.decode_ms,
            "rounds": self.rounds,
            "drafted_per_round": self.drafted / self.rounds,
            "tokens_per_round": self.tokens / self.rounds,
            "draft_ms": self.draft_ms / self.rounds,
            "verify_ms": self.verify_ms / self.rounds,
            "round_ms": self.decode_ms / self.rounds,
            "host_share": max(0.0, 1 - busy / self.decode_ms),
        }


def parse_numbers(text: str, name: str, kind: Callable[[str], Number], low: Number, high: Number) -> list[Number]:
    """`1,4,8` as numbers, each once and in order; RequestError says what is expected."""
    try:
        found = sorted({kind(part) for part in text.split(",")})
    except ValueError:
        raise RequestError(f"{name} must be numbers with commas between them, got {text!r}") from None
    if not all(low <= number <= high for number in found):  # also for NaN
        raise RequestError(f"{name} must be in [{low}, {high}], got {text!r}")
    return found


@contextmanager
def drafting(engine: "Engine", budget: int) -> Iterator[None]:
    """Meanwhile every round of the engine drafts so many nodes, the root included; 1 is plain decoding."""
    from pad_engine.controller import Controller
    from pad_engine.drafters.none import NoDrafter

    drafter, own, costs = engine.drafter, engine.controller, engine.costs
    # a depth that the budget has set goes with it; one of the drafter's own stays
    depth = budget - 1 if own.max_depth == own.max_budget - 1 else min(own.max_depth, budget - 1)
    try:
        engine.controller = Controller(budget, depth, branching=own.branching, fixed=True)
        engine.costs = None  # what is measured here is not for later processes: a step without a drafter is another one
        if budget == 1:
            engine.drafter = NoDrafter()
        yield
    finally:
        engine.drafter, engine.controller, engine.costs = drafter, own, costs


def measure_rounds(
    engine: "Engine", prompts: Sequence[list[int]], budgets: Sequence[int], temperatures: Sequence[float], tokens: int
) -> list[dict[str, Any]]:
    """One row for each temperature and budget, over all prompts. over_plain: None where plain was not asked for."""
    found = []
    for temperature in temperatures:
        plain: float | None = None
        for budget in budgets:
            with drafting(engine, budget):
                row = requests(engine, prompts, temperature, tokens).row(temperature, budget)
            plain = row["tokens_per_second"] if budget == 1 else plain
            row["over_plain"] = row["tokens_per_second"] / plain if plain else None
            found.append(row)
    return found


def requests(engine: "Engine", prompts: Sequence[list[int]], temperature: float, tokens: int) -> Sums:
    """All prompts; on a GPU behind the same that are not timed, so that their rounds are captured."""
    params = SamplingParams(tokens, temperature=temperature, seed=0, ignore_eos=True)
    for ids in prompts if engine.target.device.type == "cuda" else ():
        engine.generate(ids, params)
    sums = Sums()
    for ids in prompts:
        sums.decode_ms += 1000 * engine.generate(ids, params, on_round=sums.add).stats.decode_seconds
    if engine.rounds is not None and engine.target.device.type == "cuda":
        # a draft on the host keeps the card waiting, which is drafting and not the host's share
        sums.card_ms = sums.draft_ms + sum(
            count * card_ms(engine, prompts[0], nodes, temperature) for nodes, count in sums.nodes.items()
        )
    return sums


def card_ms(engine: "Engine", ids: Sequence[int], nodes: int, temperature: float) -> float:
    """Milliseconds that a GPU needs for a round of so many nodes behind a prompt: of rounds that nobody reads, queued
    back to back."""
    import torch

    with torch.inference_mode():
        queue = queued(engine, ids, nodes, temperature)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(CARD_WARM):
            queue()
        start.record()
        for _ in range(CARD_ROUNDS):
            queue()
        end.record()
        end.synchronize()
    elapsed: float = start.elapsed_time(end)
    return elapsed / CARD_ROUNDS


def queued(engine: "Engine", ids: Sequence[int], nodes: int, temperature: float) -> Callable[[], object]:
    """What queues one more round of so many nodes of a request that has just begun. What keys the cache holds, of this
    prompt or of another one, is the same to the clock."""
    from pad_engine.controller import RoundPlan
    from pad_engine.drafters.drafter import CapturedDrafter
    from pad_engine.graphs import TREE
    from pad_engine.tree import DraftTree

    rounds, drafter = engine.rounds, engine.drafter
    assert rounds is not None, "an engine with captured rounds"
    drafter.begin(list(ids))
    rounds.begin(0, ids, engine.max_length, [], 0, temperature)
    if drafter.captured:
        return partial(cast(CapturedDrafter, drafter).queue, rounds, RoundPlan(nodes, nodes - 1))
    if nodes == 1:
        return rounds.queue_plain
    rounds.queue_tree([DraftTree.chain([ids[-1]] * nodes)])
    return partial(rounds.queue, TREE, nodes)


def rounds_table(rows: Sequence[dict[str, Any]]) -> "Table":
    """The rows for people."""
    from rich import box
    from rich.table import Table

    table = Table(title="every round with the whole budget", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("temperature", "budget", "tokens/s", "over plain", "drafted/round", "tokens/round"):
        table.add_column(name, justify="right")
    for name in ("draft ms", "verify ms", "round ms", "host"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            f"{row['temperature']:g}",
            str(row["budget"]),
            f"{row['tokens_per_second']:.1f}",
            "-" if row["over_plain"] is None else f"{row['over_plain']:.2f}x",
            f"{row['drafted_per_round']:.2f}",
            f"{row['tokens_per_round']:.2f}",
            f"{row['draft_ms']:.3f}",
            f"{row['verify_ms']:.3f}",
            f"{row['round_ms']:.3f}",
            f"{row['host_share']:.1%}",
        )
    return table
