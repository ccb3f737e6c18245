"""Plots of what lies in bench/results/: nothing else is drawn, and a card that lacks a result has no plot of it.

    pip install 'pad-engine[plots]'
    python bench/plots.py --out docs/images

Steps against the limit that memory sets, rounds by nodes, rounds by context, and peers, for each card: SVG files whose
names begin with the card's. The same results give the same bytes.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESULTS = Path(__file__).parent / "results"
SHAPES = ("135m", "1b", "8b")
Results = dict[str, dict[str, Any]]
Draw = Callable[["Axes", Results], None]
SIZE = (7.0, 3.6)  # inches


def load(folder: Path) -> Results:
    """A card's result files by their stems."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def machine(results: Results) -> str:
    """What the results of a plot were measured on."""
    found = next(iter(results.values()))["environment"]
    return f"{found['card'] or found['processor']}, torch {found['torch']}, commit {found['commit']}"


def of_kind(results: Results, prefix: str) -> Results:
    """Those whose stems begin with a word."""
    return {stem: result for stem, result in results.items() if stem.startswith(prefix)}


def steps(results: Results) -> Results:
    """bench_step.py's, in the order of size."""
    return {f"step-{shape}": results[f"step-{shape}"] for shape in SHAPES if f"step-{shape}" in results}


def draw_steps(axes: "Axes", results: Results) -> None:
    """Milliseconds of a plain step beside the limit."""
    labels = [result["shape"] for result in results.values()]
    pairs = {
        "limit (reading once)": [result["limit_ms"] for result in results.values()],
        "plain step": [result["plain"]["ms"] for result in results.values()],
    }
    places = range(len(labels))
    for (name, values), marker, right in zip(pairs.items(), "_o", (0.06, -0.3), strict=True):
        axes.plot(places, values, marker, markersize=10, label=name)
        for place, value in zip(places, values, strict=True):
            axes.annotate(f"{value:.3f}", (place + right, value), fontsize=8, va="center")
    axes.set_xlim(-0.5, len(labels) - 0.5)
    axes.set_xticks(places, [f"{label} shape" for label in labels])
    axes.set_yscale("log")
    axes.set_ylabel("ms")
    axes.legend()


def draw_nodes(axes: "Axes", results: Results) -> None:
    """Rounds of chains by their number of nodes, over the limit."""
    for result in results.values():
        rows = [(1, result["plain"]["over_limit"])]
        rows += [(row["nodes"], row["over_limit"]) for row in result["verify"] if row["form"] == "chain"]
        axes.plot(*zip(*sorted(rows), strict=True), marker="o", label=f"{result['shape']} shape")
    axes.axhline(1.0, color="gray", linewidth=0.8)
    axes.set_yscale("log", base=2)
    axes.set_yticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    measured = {row["nodes"] for result in results.values() for row in result["verify"]}
    set_powers(axes, "nodes of the chain", sorted({1, *measured}))
    axes.set_ylabel("round / limit")
    axes.legend()


def draw_context(axes: "Axes", results: Results) -> None:
    """Milliseconds of a round by context, a line for each number of nodes."""
    (result,) = results.values()
    for nodes in sorted({row["nodes"] for row in result["rounds"]}):
        rows = sorted((row["context"], row["ms"]) for row in result["rounds"] if row["nodes"] == nodes)
        axes.plot(*zip(*rows, strict=True), marker="o", label=f"{nodes} nodes" if nodes > 1 else "plain step")
    set_powers(axes, "tokens of context", sorted({row["context"] for row in result["rounds"]}))
    axes.set_ylabel(f"ms, {result['shape']} shape")
    axes.legend(fontsize=8)


def set_powers(axes: "Axes", label: str, ticks: Sequence[int]) -> None:
    """An axis of powers of two, labelled where something was measured."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(ticks), [str(tick) for tick in ticks])
    axes.set_xlabel(label)


def draw_peers(axes: "Axes", results: Results) -> None:
    """Tokens per second of each peer that had a result."""
    (result,) = results.values()
    rates = {name: peer["tokens_per_second"] for name, peer in result["peers"].items() if "error" not in peer}
    ordered = sorted(rates.items(), key=lambda item: item[1])
    bars = axes.barh([name for name, _ in ordered], [rate for _, rate in ordered])
    for bar, (name, _) in zip(bars, ordered, strict=True):
        bar.set_color("tab:blue" if name.startswith("pad ") else "tab:gray")
    axes.bar_label(bars, [f"{rate:.0f}" for _, rate in ordered], padding=3, fontsize=8)
    axes.margins(x=0.1)  # for the longest bar's label
    axes.set_xlabel(f"tokens per second, {result['model']}")


def plots_of(results: Results) -> dict[str, tuple[Draw, Results]]:
    """The plots that a card's results are enough for, by the end of their file names."""
    found: dict[str, tuple[Draw, Results]] = {}
    if steps(results):
        found |= {"steps": (draw_steps, steps(results)), "nodes": (draw_nodes, steps(results))}
    for prefix, draw in (("context-", draw_context), ("peers-", draw_peers)):
        found |= {stem: (draw, {stem: result}) for stem, result in of_kind(results, prefix).items()}
    return found


def write(path: Path, draw: Draw, results: Results) -> None:
    """One plot as SVG, without date and with fixed ids."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
        figure = Figure(SIZE, layout="constrained")
        axes = figure.subplots()
        draw(axes, results)
        axes.set_title(machine(results), fontsize=8)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, required=True, help="folder for the SVG files")
    args = parser.parse_args(arguments)
    for folder in sorted(path for path in args.results.iterdir() if path.is_dir()):
        for name, (draw, results) in plots_of(load(folder)).items():
            path = args.out / f"{folder.name}-{name}.svg"
            write(path, draw, results)
            print(path)


if __name__ == "__main__":
    main()
