"""Write the README's table of GPU figures from bench/results/, or check that it is up to date.

    python bench/table.py             # writes it, between two comments of README.md
    python bench/table.py --check     # exit code 1 when the table is not what the results say

Every folder of results/ that holds a measured figure is a card. What was not measured has no row.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- figures -->", "<!-- /figures -->"
NOTHING = "Not measured yet."


@dataclass(frozen=True)
class Figure:
    """One row: what of a result file it shows, and the bound that it should keep.

    file: stem of the JSON file. value: finds the number in it. unit: a format of the number. bound: None where a figure
    is only reported. at_least: whether the bound is a lower one.
    """

    name: str
    file: str
    value: Callable[[dict[str, Any]], float]
    unit: str
    bound: float | None
    at_least: bool = False

    @property
    def target(self) -> str:
        """The bound in words."""
        if self.bound is None:
            return "reported"
        return f"{'at least' if self.at_least else 'at most'} {self.unit.format(self.bound)}"

    def verdict(self, value: float) -> str:
        """Whether the figure keeps its bound."""
        if self.bound is None:
            return "-"
        return "met" if (value >= self.bound if self.at_least else value <= self.bound) else "missed"


def of(*keys: str) -> Callable[[dict[str, Any]], float]:
    """The number at the end of a way through a result."""

    def find(result: dict[str, Any]) -> float:
        found: Any = result
        for key in keys:
            found = found[key]
        return float(found)

    return find


def verify(nodes: int, key: str) -> Callable[[dict[str, Any]], float]:
    """A number of the verification of a chain."""
    return lambda result: entry(result["verify"], nodes=nodes, form="chain")[key]


def entry(entries: list[dict[str, Any]], **wanted: object) -> dict[str, Any]:
    """The first entry with these values; KeyError if there is none."""
    for found in entries:
        if all(found.get(key) == value for key, value in wanted.items()):
            return found
    raise KeyError(str(wanted))


def kv_share(nodes: int) -> Callable[[dict[str, Any]], float]:
    """The share of the read rate that attention reaches at a long context."""
    return lambda result: entry(result["kv"], nodes=nodes)["share"]


def of_tail(shape: str, *keys: str) -> Callable[[dict[str, Any]], float]:
    """A number of bench_tail.py's result of a shape."""
    return lambda result: of(*keys)(entry(result["tails"], shape=shape))


def rule_tail(shape: str, rule: str) -> Callable[[dict[str, Any]], float]:
    """A rule's microseconds beyond a pass that only writes its logits."""
    return of_tail(shape, "tail_us", rule, "us")


def over_greedy(shape: str, rule: str) -> Callable[[dict[str, Any]], float]:
    """A rule's microseconds beyond those of greedy."""
    return of_tail(shape, "over_greedy_us", rule, "us")


def of_drafted(*keys: str) -> Callable[[dict[str, Any]], float]:
    """A number of bench_round.py's result: of its rounds with four drafted tokens at temperature 0."""
    return lambda result: of(*keys)(entry(result["drafted"], depth=4, temperature=0.0))


def over_peer(own: str, peer: str) -> Callable[[dict[str, Any]], float]:
    """Tokens a second of ours over a peer's, of bench_peers.py's result."""
    ours, theirs = (of("peers", name, "tokens_per_second") for name in (own, peer))
    return lambda result: ours(result) / theirs(result)


COMPILED, UNFLOORED = "transformers static, compiled", "pivot:floor=0,sigma=0.5"
RATIO, MS, US, SHARE, MB, SECONDS = "{:.3f}x limit", "{:.3f} ms", "{:.1f} us", "{:.1%}", "{:.0f} MB", "{:.1f} s"
HOST, COLD, REAL = "host_share", "cold-", "generate-smollm2-135m-cuda-bfloat16"
TIMES, RATE = "{:.2f}x", "{:.0f} tokens/s"
FIGURES = (
    Figure("plain step, 8B shape", "step-8b", of("plain", "over_limit"), RATIO, 1.06),
    Figure("plain step, 8B shape, int8", "step-8b-int8", of("plain", "over_limit"), RATIO, 1.15),
    Figure("plain step, 8B shape, fp8", "step-8b-fp8", of("plain", "over_limit"), RATIO, 1.15),
    Figure("plain step, 1B shape", "step-1b", of("plain", "over_limit"), RATIO, 1.15),
    Figure("plain step, SmolLM2-135M shape", "step-135m", of("plain", "ms"), MS, 0.33),
    Figure("verify 16 nodes, 8B shape", "step-8b", verify(16, "over_limit"), RATIO, 1.13),
    Figure("verify 64 nodes, 8B shape", "step-8b", verify(64, "over_limit"), RATIO, 1.23),
    Figure("verify 16 nodes, 1B shape", "step-1b", verify(16, "over_limit"), RATIO, 1.27),
    Figure("verify 16 nodes, SmolLM2-135M shape", "step-135m", verify(16, "ms"), MS, 0.36),
    Figure("tail of 16 nodes, greedy, 8B shape", "step-8b", of("tail_us", "greedy", "us"), US, 10),
    Figure("tail of 16 nodes, match, 8B shape", "step-8b", of("tail_us", "match", "us"), US, 10),
    Figure("tail of 16 nodes, margin, 8B shape", "tail", rule_tail("8b", "margin"), US, 10),
    Figure("tail of 16 nodes, pivot, 8B shape", "tail", rule_tail("8b", "pivot"), US, 10),
    Figure("margin over greedy, 8B shape", "tail", over_greedy("8b", "margin"), US, 2),
    Figure("pivot over greedy, 8B shape", "tail", over_greedy("8b", "pivot"), US, 2),
    Figure("margin over greedy, 1B shape", "tail", over_greedy("1b", "margin"), US, 2),
    Figure("pivot over greedy, 1B shape", "tail", over_greedy("1b", "pivot"), US, 2),
    Figure("rejection of 16 nodes, kernels alone", "tail", of_tail("8b", "rejection_us"), US, 20),
    Figure("margin and pivot by torch, unfused", "tail", of_tail("8b", "torch_us", "unfused"), US, None),
    Figure("margin and pivot by torch, compiled", "tail", of_tail("8b", "torch_us", "compiled"), US, None),
    Figure("host share, plain rounds, 8B shape", "step-8b", of(HOST, "plain, run ahead", "share"), SHARE, 0.02),
    Figure("host share, plain rounds, 135M shape", "step-135m", of(HOST, "plain, run ahead", "share"), SHARE, 0.02),
    Figure("host share, host's trees, 8B shape", "step-8b", of(HOST, "tree, from the host", "share"), SHARE, 0.02),
    Figure("KV reading at 32k, 1 node, of read rate", "kv", kv_share(1), SHARE, 0.8, at_least=True),
    Figure("KV reading at 32k, 16 nodes", "kv", kv_share(16), SHARE, 0.8, at_least=True),
    Figure("KV reading at 32k, 64 nodes", "kv", kv_share(64), SHARE, None),
    Figure(
        "prefill of 2,048 tokens, 8B shape, speed over transformers",
        "prefill", of("prefill", "over_transformers"), "{:.2f}x", 0.9, at_least=True,
    ),
    Figure("first token, SmolLM2-135M, kernels cached", COLD + "smollm2-135m", of("seconds", "cached"), SECONDS, 3),
    Figure("first token, SmolLM2-135M, none cached", COLD + "smollm2-135m", of("seconds", "not_cached"), SECONDS, 30),
    Figure("first token, 8B shape, kernels cached", COLD + "8b", of("seconds", "cached"), SECONDS, 3),
    Figure("first token, 8B shape, none cached", COLD + "8b", of("seconds", "not_cached"), SECONDS, 30),
    Figure("one draft step in the loop over a plain one, 1B shape", "round-8b-1b", of("draft", "step_over_plain"),
           "{:.3f}x", 1.02),
    Figure("one draft step in the loop, 1B shape", "round-8b-1b", of("draft", "step_ms"), MS, None),
    Figure("the same with an LM head of 32,768 tokens", "round-8b-1b", of("few_tokens", "step_ms"), MS, None),
    Figure("8B + 1B draft, K = 4, forced to 3.5 tokens a round", "round-8b-1b", of_drafted("tokens_per_second"),
           RATE, 370, at_least=True),
    Figure("1B + 4-layer draft, K = 4, forced to 3.77, a token", "round-1b-1b-4", of_drafted("ms_per_token"),
           MS, 0.70),
    Figure("drafted tokens/s over its parts', 8B + 1B", "round-8b-1b", of_drafted("over_parts"), SHARE, 0.95,
           at_least=True),
    Figure("drafted tokens/s over its parts', 1B + 4 layers", "round-1b-1b-4", of_drafted("over_parts"), SHARE,
           0.95, at_least=True),
    Figure("host share, drafted rounds, 8B + 1B", "round-8b-1b", of_drafted(HOST), SHARE, 0.02),
    Figure("host share, drafted rounds, 1B + 4 layers", "round-1b-1b-4", of_drafted(HOST), SHARE, 0.02),
    Figure("ngram over plain, SmolLM2, worst group", REAL, of("drafters", "ngram", "least over plain"), TIMES, 0.98,
           at_least=True),
    Figure("plain over transformers, static cache and compiled, SmolLM2", "peers-smollm2-135m",
           over_peer("pad plain", COMPILED), TIMES, None),
    Figure("plain over transformers, static cache and compiled, 1B shape", "peers-1b-1b-4",
           over_peer("pad plain", COMPILED), TIMES, None),
    Figure("prompt lookup over flashspec 0.3.1, SmolLM2, a question of each group", "peers-smollm2-135m",
           over_peer("pad ngram", "flashspec"), TIMES, None),
    Figure("draft model over plain, the controller deciding, 1B + 4 layers at 3.77", "ours-1b-1b-4",
           over_peer("pad draft-model", "pad plain"), TIMES, None),
    Figure("pivot rule over plain, pair widened to 8B + 1B", "pivot-speed-mixed",
           of("wide", UNFLOORED, "every_round", "over_plain"), TIMES, None),
    Figure("greedy verification over plain, the same pair", "pivot-speed-mixed",
           of("wide", "greedy", "every_round", "over_plain"), TIMES, None),
    Figure("memory beyond weights and cache, 8B shape", "step-8b", of("memory_mb", "reserved_beyond"), MB, 500),
)  # fmt: skip


def card_rows(folder: Path) -> Iterator[str]:
    """A card's lines of the table."""
    for figure in FIGURES:
        path = folder / f"{figure.file}.json"
        if not path.is_file():
            continue
        result = json.loads(path.read_text(encoding="utf-8"))
        try:
            value = figure.value(result)
        except KeyError:
            continue  # a run of fewer nodes or shapes
        cells = (folder.name, figure.name, figure.unit.format(value), figure.target, figure.verdict(value))
        yield f"| {' | '.join(cells)} |"


def table(results: Path) -> str:
    """The table of all cards, or a sentence when nothing was measured."""
    rows = [row for folder in sorted(results.iterdir()) if folder.is_dir() for row in card_rows(folder)]
    return "\n".join(["| card | figure | measured | target | |", "|---|---|---|---|---|", *rows] if rows else [NOTHING])


def with_table(text: str, content: str) -> str:
    """The text with the table in place of what lies between the two comments; ValueError without them."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no {BEGIN} ... {END} to write the table between")
    return f"{before}{BEGIN}\n{content}\n{END}{after}"


def main(arguments: list[str] | None = None) -> int:
    """0, or 1 when --check finds another table than there should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    args = parser.parse_args(arguments)
    text = args.readme.read_text(encoding="utf-8")
    wanted = with_table(text, table(args.results))
    if args.check and wanted != text:
        print(f"{args.readme.name} is not up to date: run python bench/table.py", file=sys.stderr)
        return 1
    if not args.check:
        args.readme.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
