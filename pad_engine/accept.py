"""The accepted path of each sequence and the token after it: of one tree by libpad, of several by a few operations over
the rows of all.

Next to read: kernels/accept_path.py for the meaning, csrc/cpu/accept.cpp for the loops.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pad_engine import native, native_accept
from pad_engine.kernels.rejection import RejectionWorkspace, rejection_chain
from pad_engine.record import Record
from pad_engine.rules.greedy import judge_pick
from pad_engine.rules.override import Judged, Override, Relaxed, Verdict, judged_nodes, kept_length, on_host, relax
from pad_engine.rules.rejection import REJECTION
from pad_engine.rules.rule import AcceptanceRule, Accepted
from pad_engine.state import State
from pad_engine.tree import DraftTree, Forest


def accept_each(
    record: Record,
    rules: Sequence[AcceptanceRule],
    states: Sequence[State],
    trees: Sequence[DraftTree],
    places: Sequence[int] | None = None,
) -> list[Accepted]:
    """For each state what its rule keeps of its tree; those that judge alike together. places: of their trees, which
    several may share; by default each has one of its own."""
    followers = list(zip(range(len(states)) if places is None else places, states, strict=True))
    groups: dict[tuple[int, int, int], list[int]] = {}
    for index, rule in enumerate(rules):
        groups.setdefault((id(rule.judge), id(rule.walk_path), id(rule.override)), []).append(index)
    found: dict[int, Accepted] = {}
    for members in groups.values():
        theirs = [followers[index] for index in members]
        found |= zip(members, accept(record, rules[members[0]], theirs, trees), strict=True)
    return [found[index] for index in range(len(rules))]


def accept(
    record: Record, rule: AcceptanceRule, followers: Sequence[tuple[int, State]], trees: Sequence[DraftTree]
) -> list[Accepted]:
    """What the rule keeps for each follower: the place of a tree in the forest, and who follows it."""
    if rule.override is not None:
        return accept_relaxed(record, rule, rule.override, followers, trees)
    if rule.walk_path is not None:
        if rule is REJECTION and len(followers) == 1 and on_card(record, followers[0][1], trees):
            return [reject_on_card(record, followers[0][1], trees[0])]
        starts = record.forest.starts
        return [rule.walk_path(record, starts[place], state, trees[place], None) for place, state in followers]
    paths, ends = accept_paths(record, rule)
    return [Accepted([row - paths[place][0] for row in paths[place]], ends[place]) for place, _ in followers]


def on_card(record: Record, state: State, trees: Sequence[DraftTree]) -> bool:
    """Whether a kernel can walk: one sampled chain whose logits, and draft probabilities if any, lie on a GPU."""
    if not record.processed.is_cuda or len(trees) != 1 or state.params.greedy:
        return False
    tree = trees[0]
    q_there = tree.q_rows is None or (tree.q_rows.is_cuda and tree.q_rows.stride(1) == 1)
    return q_there and all(parent == node - 1 for node, parent in enumerate(tree.parents))


def reject_on_card(record: Record, state: State, tree: DraftTree) -> Accepted:
    """The walk of rules/rejection.py by kernels; the host reads two numbers instead of every row."""
    device = record.processed.device
    workspace = RejectionWorkspace(len(tree), device)
    q_rows = None if tree.q_rows is None else tree.q_rows.float()
    rejection_chain(
        record.processed, q_rows, record.token.to(device), record.row_pick.to(device), workspace,
        temperature=state.params.temperature, position=len(state.ids) - 1, seed=state.seed, round_index=state.round,
    )  # fmt: skip
    kept, end_token = workspace.out.tolist()
    return Accepted(list(range(kept + 1)), end_token)


def accept_paths(record: Record, rule: AcceptanceRule) -> tuple[list[list[int]], list[int]]:
    """For each sequence of the forest its path, as rows of the forest from the root on, and the token after it."""
    f = record.forest
    if rule.judge is judge_pick and native.available() and len(f.starts) == 1:
        return native_accept.match_path(
            f.token, f.parent, record.row_pick, f.tree_mask_bits, f.depth, f.seq, len(f.starts)
        )
    judged, score = rule.judge(record)
    paths = judged_paths(f, judged.cpu(), score.float().cpu())
    ends = record.picks
    return paths, [ends[path[-1]] for path in paths]


def accept_relaxed(
    record: Record,
    rule: AcceptanceRule,
    override: Override,
    followers: Sequence[tuple[int, State]],
    trees: Sequence[DraftTree],
) -> list[Accepted]:
    """The same for a rule with an override."""
    f, judged = record.forest, on_host(judged_nodes(record, override))
    walk = rule.walk_path
    base = rule.judge(record)[0] if walk is None else torch.zeros(len(f.token), dtype=torch.bool)
    verdict = relaxed_verdict(base, record.judge_pick >= 0, judged, override)
    if record.processed is not record.logits:
        excluded = verdict.overridden & ~record.judge_possible
        verdict = Verdict(verdict.accept & ~excluded, verdict.overridden & ~excluded, verdict.score)
    relaxed = Relaxed(record, override, judged, verdict)
    if walk is not None:
        return [walk(record, f.starts[place], state, trees[place], relaxed) for place, state in followers]
    paths = relaxed_paths(f, verdict, override, [(place, state.history) for place, state in followers])
    ends, flags, found = record.picks, verdict.overridden.tolist(), []
    for path in paths:
        start = path[0]
        overridden = tuple(relaxed.describe(row, row - start) for row in path[1:] if flags[row])
        found.append(Accepted([row - start for row in path], ends[path[-1]], overridden))
    return found


def relaxed_verdict(base: Tensor, known: Tensor, judged: Judged, override: Override) -> Verdict:
    """base, known: bool `[N]`, what the base accepts and which judging rows are finite, since nothing follows one that
    is not. All are on the CPU."""
    verdict = relax(base & known, judged, override)
    return Verdict(verdict.accept & known, verdict.overridden & known, verdict.score)


def relaxed_paths(
    forest: Forest, verdict: Verdict, override: Override, followers: Sequence[tuple[int, int]]
) -> list[list[int]]:
    """The paths, cut where an override's bounds forbid more. followers: of each the place of its tree, and its history
    as of State."""
    flags = verdict.overridden.tolist()
    paths = judged_paths(forest, verdict.accept, verdict.score)
    each = ((paths[place], history) for place, history in followers)
    return [path[: kept_length(path, flags, forest, override, history)] for path, history in each]


def judged_paths(forest: Forest, judged: Tensor, score: Tensor) -> list[list[int]]:
    """The paths from a rule's judgements, bool `[N]`, and scores, fp32 `[N]`. A NaN score is below any other."""
    if native.available() and len(forest.starts) == 1:
        kept = native_accept.accept_bits(judged.contiguous(), score.contiguous(), forest.parent)
        return native_accept.accept_path(forest.tree_mask_bits, kept, forest.depth, forest.seq, len(forest.starts))
    return kept_paths(forest, kept_nodes(forest, judged, score))


def kept_nodes(forest: Forest, judged: Tensor, score: Tensor) -> npt.NDArray[np.bool_]:
    """The roots, and of the accepted children of each node the one of the best score, then of the lowest row: bool
    `[N]`."""
    parent = forest.parent.numpy()
    kept = parent < 0
    rows = np.flatnonzero(judged.numpy() & ~kept)
    # the order is stable, and has NaN at its end
    rows = rows[np.lexsort((-score.numpy()[rows], parent[rows]))]
    kept[rows[np.diff(parent[rows], prepend=-1) > 0]] = True
    return kept


def kept_paths(forest: Forest, kept: npt.NDArray[np.bool_]) -> list[list[int]]:
    """For each sequence the rows that are kept with all their ancestors, root first. kept: bool `[N]`, one child of a
    node at most."""
    kept, ancestor = kept.copy(), forest.parent.numpy().copy()
    # each row knows of twice as many ancestors every time
    while len(rows := np.flatnonzero(ancestor >= 0)):
        kept[rows] &= kept[ancestor[rows]]
        ancestor[rows] = ancestor[ancestor[rows]]
    on_path = np.flatnonzero(kept)
    ends = [*np.searchsorted(on_path, forest.starts[1:]).tolist(), len(on_path)]
    rows_of = on_path.tolist()
    return [rows_of[start:end] for start, end in pairwise([0, *ends])]
