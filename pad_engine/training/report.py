"""The tables and the plot of an evaluation. Next to read: summary.py, where the figures come from."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from pad_engine.files import write_file
from pad_engine.training.settings import DRAFT, GREEDY, TARGET
from pad_engine.training.summary import Evaluation, Summary

COLUMNS = (
    "setting", "right", "utility", "harm", "harm at most", "net", "accepted", "accept length", "tokens/round",
    "overrides/100", "wrong", "truncated", "tokens/s",
)  # fmt: skip


def markdown(found: Evaluation, speeds: Mapping[str, Mapping[str, Any]]) -> str:
    """The settings, the rules at equal numbers of overrides, and what is odd. speeds: of settings that were timed."""
    greedy = next(one for one in found.settings if one.setting == GREEDY)
    rows = [cells(one, greedy.mean_accept_length, speeds) for one in found.settings]
    parts = [table(COLUMNS, rows)]
    parts.append(
        f"Lossless speculation gave the target's ids for {greedy.same_as_target} of {greedy.questions} questions."
    )
    if found.equal and len(found.families) > 1:
        parts += ["Rate of harm at equal numbers of overrides:", equal_overrides(found.equal)]
    parts += [f"{step.loose} harms less than {step.strict}: {step.fewer} questions against {step.more}, "
              f"p = {step.p_value:.2g}." for step in found.falls]  # fmt: skip
    return "\n\n".join(parts)


def cells(one: Summary, greedy: float | None, speeds: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The row of a setting. Net differences are in points of a hundred. Accept lengths stand beside that of greedy
    verification."""
    net = f"{100 * one.net:+.2f} ({100 * one.net_interval[0]:+.2f}, {100 * one.net_interval[1]:+.2f})"
    utility = f"{one.utility:.4f} ({one.utility_interval[0]:.4f}, {one.utility_interval[1]:.4f})"
    is_target = one.setting == TARGET
    return [
        one.setting, f"{one.right}/{one.questions}", utility, "-" if is_target else str(one.harms),
        "-" if is_target else f"{one.harm_upper_bound:.4f}", "-" if is_target else net, number(one.acceptance_rate, 3),
        over(one.mean_accept_length, greedy, 2), f"{one.tokens_per_round:.2f}", f"{one.overrides_per_100_tokens:.2f}",
        str(one.wrong), str(one.truncated), speed(one.setting, speeds),
    ]  # fmt: skip


def speed(setting: str, speeds: Mapping[str, Mapping[str, Any]]) -> str:
    """Tokens a second of a setting, and how often they hold the target's alone, if one machine has timed both."""
    one, plain = (speeds.get(name, {}) for name in (setting, TARGET))
    base = plain.get("tokens_per_second") if one.get("machine") == plain.get("machine") else None
    return over(one.get("tokens_per_second"), base, 1)


def number(value: float | None, digits: int) -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def over(value: float | None, base: float | None, digits: int) -> str:
    """A figure, and how often it holds another."""
    return f"{value:.{digits}f} ({value / base:.2f}x)" if value is not None and base else number(value, digits)


def equal_overrides(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rate of harm of each family of settings, one row a number of overrides; a dash beyond what it reached."""
    names = list(rows[0]["harm"])
    lines = [[f"{row['overrides']:g}", *(number(row["harm"][name], 4) for name in names)] for row in rows]
    return table(("overrides", *names), lines)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown, the first column to the left."""
    # a rule's alternatives are written with bars, which would end a cell
    lines = [[cell.replace("|", "\\|") for cell in row] for row in (head, *rows)]
    marks = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], marks, *lines[1:]))


def plot(path: Path, found: Evaluation) -> bool:
    """Utility and harm against accept length, a line a family of settings, as a PNG. False, and nothing written, where
    matplotlib is not installed (pip install 'pad-engine[plots]')."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(12, 5), layout="constrained")
    FigureCanvasAgg(figure)
    utility, harm = figure.subplots(1, 2)
    by_name = {one.setting: one for one in found.settings}
    for name, sweep in found.families.items():
        length = [one.mean_accept_length or 0.0 for one in sweep]
        ends = [[one.utility - one.utility_interval[0] for one in sweep],
                [one.utility_interval[1] - one.utility for one in sweep]]  # fmt: skip
        utility.errorbar(length, [one.utility for one in sweep], yerr=ends, marker="o", capsize=2, label=name)
        harm.plot(length, [one.harm for one in sweep], marker="o", label=name)
    for name, style in ((TARGET, "--"), (DRAFT, ":")):
        utility.axhline(by_name[name].utility, color="black", linestyle=style, label=name)
    for axes in (utility, harm):
        axes.axvline(
            by_name[GREEDY].mean_accept_length or 0.0, color="grey", linestyle="--", label="greedy verification"
        )
    utility.set(xlabel="accepted tokens a round", ylabel="utility")
    harm.set(xlabel="accepted tokens a round", ylabel="rate of harm")
    utility.legend(fontsize="small")
    image = BytesIO()
    figure.savefig(image, format="png", dpi=120)
    write_file(path, image.getvalue())
    return True
