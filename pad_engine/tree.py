"""Draft trees, and the forest of rows that one pass of the target verifies.

A tree is a list of tokens with a parent each; node 0 is the root, the sequence's last committed token, which the target
has not read yet. A chain is a tree, and a plain decoding step is a tree of one node. A forest is several trees, of
several sequences, behind one another. Run this file to see a tree and its mask. Next to read: verify.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

UNKNOWN = -1  # in place of a token that was drafted and rejected on a GPU, which does not report it


@dataclass(frozen=True)
class DraftTree:
    """Tokens proposed to follow `tokens[0]`.

    parents[i] < i for every node but the root, whose parent is -1. `evidence` is the drafter's own class of how sure it
    is (an n-gram drafter gives the length of its match); the controller keeps an acceptance rate for each class.
    q_rows: fp32 `[N, V']`, for each node the distribution that its children were drawn from, without replacement and in
    their order; V' may be shorter than the target's vocabulary. None: nothing was drawn, the drafter was sure.
    """

    tokens: list[int]
    parents: list[int]
    evidence: int = 0
    q_rows: Tensor | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.parents) or self.parents[0] != -1:
            raise ValueError(
                f"a tree has a root with parent -1 and a parent a token, got {self.tokens}, {self.parents}"
            )
        if any(not 0 <= parent < node for node, parent in enumerate(self.parents) if node):
            raise ValueError(f"parents must come before their children, got {self.parents}")

    @classmethod
    def chain(cls, tokens: Sequence[int], evidence: int = 0) -> "DraftTree":
        """A tree without branches; `tokens[0]` is the root."""
        return cls(list(tokens), list(range(-1, len(tokens) - 1)), evidence)

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def depth(self) -> list[int]:
        """The number of ancestors of each node. Not to be changed."""
        depth: list[int] = []
        for parent in self.parents:
            depth.append(depth[parent] + 1 if parent >= 0 else 0)
        return depth

    @property
    def children(self) -> list[list[int]]:
        """The children of each node, in order."""
        children: list[list[int]] = [[] for _ in self.tokens]
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                children[parent].append(node)
        return children

    @property
    def paths(self) -> list[list[int]]:
        """For each node the tokens from the root's child to its own; the root's own token is committed already."""
        paths: list[list[int]] = []
        for node, parent in enumerate(self.parents):
            paths.append([*paths[parent], self.tokens[node]] if node else [])
        return paths

    @property
    def is_chain(self) -> bool:
        """Whether each node follows the one before it."""
        return self.parents == list(range(-1, len(self) - 1))

    def mask(self) -> Tensor:
        """`[N, N]` bool: entry (i, j) says that j is i or an ancestor of i."""
        if self.is_chain:
            return torch.ones(len(self), len(self), dtype=torch.bool).tril_()
        mask = torch.eye(len(self), dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                mask[node] |= mask[parent]
        return mask

    def clip(self, max_depth: int, max_nodes: int) -> "DraftTree":
        """The tree without nodes deeper than max_depth, and of those left the first max_nodes."""
        depth = self.depth
        kept: list[int] = []
        index: dict[int, int] = {}
        for node, parent in enumerate(self.parents):
            if len(kept) < max_nodes and depth[node] <= max_depth and (parent < 0 or parent in index):
                index[node] = len(kept)
                kept.append(node)
        if len(kept) == len(self):
            return self
        parents = [index[self.parents[node]] if node else -1 for node in kept]
        q_rows = None if self.q_rows is None else self.q_rows[kept]
        return DraftTree([self.tokens[node] for node in kept], parents, self.evidence, q_rows)


@dataclass(frozen=True)
class Forest:
    """The rows of one pass: trees of several sequences, each sequence's rows side by side.

    token, parent, depth, seq: int32 `[N]`; `parent` counts rows of the forest, -1 at roots. starts: the roots' rows.
    """

    token: Tensor
    parent: Tensor
    depth: Tensor
    seq: Tensor
    starts: list[int]

    @cached_property
    def tree_mask_bits(self) -> Tensor:
        """int64 `[N, W]`, W = ceil(N / 64): bit j of row i says that row j is row i or an ancestor of it."""
        return mask_bits(self.parent.tolist())

    @cached_property
    def reach(self) -> list[int]:
        """How many levels of its tree are below each row."""
        parents = self.parent.tolist()
        reach = [0] * len(parents)
        for row in range(len(parents) - 1, 0, -1):  # children come behind their parents
            if parents[row] >= 0:
                reach[parents[row]] = max(reach[parents[row]], reach[row] + 1)
        return reach


def make_forest(trees: Sequence[DraftTree], seqs: Sequence[int]) -> Forest:
    """Lay trees behind one another. seqs: the sequence of each tree, all different."""
    if len(set(seqs)) != len(seqs) or len(seqs) != len(trees):
        raise ValueError(f"each tree needs a sequence of its own, got {list(seqs)} for {len(trees)} trees")
    rows, starts = lay_out(trees, seqs)
    columns = {name: column(values) for name, values in rows.items()}
    return Forest(**columns, starts=starts)


def lay_out(trees: Sequence[DraftTree], seqs: Sequence[int]) -> tuple[dict[str, list[int]], list[int]]:
    """The columns token, parent, depth and seq of a Forest, as plain integers, and the roots' rows."""
    rows: dict[str, list[int]] = {name: [] for name in ("token", "parent", "depth", "seq")}
    starts: list[int] = []
    for tree, seq in zip(trees, seqs, strict=True):
        start = len(rows["token"])
        starts.append(start)
        rows["token"] += tree.tokens
        rows["parent"] += [start + p if p >= 0 else -1 for p in tree.parents]
        rows["depth"] += tree.depth
        rows["seq"] += [seq] * len(tree)
    return rows, starts


def column(values: Sequence[int]) -> Tensor:
    """int32 `[N]`."""
    return torch.tensor(values, dtype=torch.int32)


def mask_bits(parents: Sequence[int]) -> Tensor:
    """int64 `[N, W]` words of ancestors-or-self, 64 nodes a word, lowest bit first; parents before children."""
    rows = [[0] * ((len(parents) + 63) // 64) for _ in parents]
    for node, bits in enumerate(ancestors(parents)):
        # the words between its root's and its own are the only ones that are not 0
        for word in range(((bits & -bits).bit_length() - 1) // 64, node // 64 + 1):
            rows[node][word] = to_int64(bits >> 64 * word & 2**64 - 1)
    return torch.tensor(rows, dtype=torch.int64)


def ancestors(parents: Sequence[int]) -> list[int]:
    """For each node the bits of its ancestors and itself, lowest first; parents before children."""
    bits: list[int] = []
    for node, parent in enumerate(parents):
        bits.append((bits[parent] if parent >= 0 else 0) | 1 << node)
    return bits


def to_int64(bits: int) -> int:
    """The same 64 bits as a signed number."""
    return bits - 2**64 if bits >= 2**63 else bits


if __name__ == "__main__":
    example = DraftTree([11, 12, 13, 14, 15], [-1, 0, 0, 1, 1])
    print("node token parent depth  sees")
    for i, row in enumerate(example.mask()):
        seen = "".join("x" if bit else "." for bit in row.tolist())
        print(f"{i:4} {example.tokens[i]:5} {example.parents[i]:6} {example.depth[i]:5}  {seen}")
