"""What a classifier sees of labelled tokens, by the engine's own decoder and taps: the hidden state of each token's own
row, and the scalars of the row that judges it, as rules/override.py takes them from a Record.

Labels of one question share their text, so it is read once: the longest text is a trunk, and tokens that it does not
hold hang as leaves below their place in it. Many trunks are read in one pass of the target. Next to read: pivot.py.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pad_engine.errors import NonFiniteError, RequestError
from pad_engine.kv_cache import KVCache, RowGroup, prefill_chunk
from pad_engine.kv_forest import commit_forest
from pad_engine.models.decoder import Decoder
from pad_engine.record import row_stats
from pad_engine.rules.classifier import SCALARS
from pad_engine.training.label_file import Label
from pad_engine.verify import place, read_prompts

TRUNKS = 32  # that are read at once: one alone is hardly more to a device than the words that queue it
ROWS = 256  # of a trunk, in one pass
SAME_CHOICE = 0.9  # of the labels, less rounding between devices and passes


@dataclass(frozen=True)
class Features:
    """Of N labels, on the CPU. hidden: fp32 `[N, hidden_size]` by tap layer, before the final norm. scalars: fp32 `[N]`
    by the names of SCALARS, raw, at temperature 1. choice: int64 `[N]`, the target's likeliest token at each place."""

    hidden: dict[int, Tensor]
    scalars: dict[str, Tensor]
    choice: Tensor


@dataclass(frozen=True)
class Trunk:
    """A text and the labels whose prefixes begin it. The text ends with a judged token. members: indices of labels."""

    prompt_length: int
    ids: list[int]
    members: list[int]


@dataclass(frozen=True)
class Rows:
    """The rows of a trunk from its prompt's last token on, leaves behind the row that they hang below.

    token, position: of each row; kept: whether it belongs to the trunk. judge, own: for each member the row that judges
    its token, and the token's own."""

    token: list[int]
    position: list[int]
    kept: list[bool]
    judge: list[int]
    own: list[int]


def extract_features(
    target: Decoder,
    labels: Sequence[Label],
    tap_layers: Sequence[int],
    num_tokens: int,
    progress: Callable[[int], None] = lambda done: None,
) -> Features:
    """Read every label's text and judged token, teacher-forced.

    num_tokens: ids from here on are padding of the vocabulary. progress: is told how many questions are done.
    RequestError when a tap layer, a token or a length is none of this model's, or the labels are another model's;
    NonFiniteError when a state or a row is not finite.
    """
    check_labels(target, labels, tap_layers, num_tokens)
    n = len(labels)
    hidden = {layer: torch.empty(n, target.config.hidden_size) for layer in tap_layers}
    scalars = {name: torch.empty(n) for name in SCALARS}
    found = Features(hidden, scalars, torch.empty(n, dtype=torch.int64))
    longest = max(len(label.prompt_ids) + len(label.prefix_ids) + 1 for label in labels)
    cache = target.new_cache(num_seqs=TRUNKS, capacity=longest, scratch=ROWS)
    waiting: list[Trunk] = []
    for done, members in enumerate((questions := by_question(labels)).values(), 1):
        waiting += trunks(labels, members)
        while len(waiting) >= TRUNKS or (waiting and done == len(questions)):
            read_trunks(target, cache, waiting[:TRUNKS], labels, num_tokens, found)
            del waiting[:TRUNKS]
        progress(done)
    if not all(values.isfinite().all() for values in (*hidden.values(), *scalars.values())):
        raise NonFiniteError("the target's states or logits are not finite behind some of the labelled tokens")
    same = float((found.choice == torch.tensor([label.target_id for label in labels])).float().mean())
    if same < SAME_CHOICE:
        raise RequestError(
            f"the labels were made with another target: its choice is this model's for {same:.0%} of them only",
            "give the model, and the adapters, that `pad label` had",
        )
    return found


def check_labels(target: Decoder, labels: Sequence[Label], tap_layers: Sequence[int], num_tokens: int) -> None:
    """RequestError unless this model can read them."""
    layers = target.config.num_layers
    if wrong := [layer for layer in tap_layers if not 0 <= layer < layers]:
        raise RequestError(f"tap layer {wrong[0]}: this model has layers 0 to {layers - 1}")
    for label in labels:
        name = f"label of question {label.question}, step {label.step}"
        ids = (*label.prompt_ids, *label.prefix_ids, label.draft_id, label.target_id)
        if max(ids) >= num_tokens or min(ids) < 0:
            raise RequestError(
                f"{name}: token {max(ids) if max(ids) >= num_tokens else min(ids)} is not one of this model's "
                f"{num_tokens}",
                "the labels were made with a model of another vocabulary",
            )
        if len(ids) - 1 > target.max_length:
            raise RequestError(f"{name}: {len(ids) - 1} tokens do not fit a context of {target.max_length}")


def by_question(labels: Sequence[Label]) -> dict[str, list[int]]:
    """The indices of each question's labels."""
    found: dict[str, list[int]] = {}
    for index, label in enumerate(labels):
        found.setdefault(label.question, []).append(index)
    return found


def trunks(labels: Sequence[Label], members: Sequence[int]) -> Iterator[Trunk]:
    """Few texts that hold all prefixes of some labels: the longest first, with all that begin it."""
    left = sorted(members, key=lambda index: -len(labels[index].prefix_ids))
    while left:
        first = labels[left[0]]
        prompt, ids = first.prompt_ids, [*first.prompt_ids, *first.prefix_ids, first.draft_id]
        within = [index for index in left if labels[index].prompt_ids == prompt and begins(labels[index], ids)]
        left = [index for index in left if index not in within]
        yield Trunk(len(prompt), ids, within)


def begins(label: Label, ids: Sequence[int]) -> bool:
    """Whether a text with the label's prompt goes on with its prefix."""
    start = len(label.prompt_ids)
    return label.prefix_ids == ids[start : start + len(label.prefix_ids)]


def lay_out(trunk: Trunk, labels: Sequence[Label]) -> Rows:
    """The trunk's rows, and a leaf for every member whose token is not the trunk's own."""
    rows = Rows([], [], [], [0] * len(trunk.members), [0] * len(trunk.members))
    places: dict[int, list[int]] = {}
    for member, index in enumerate(trunk.members):
        places.setdefault(trunk.prompt_length + len(labels[index].prefix_ids), []).append(member)

    def add(token: int, position: int, kept: bool) -> int:
        rows.token.append(token)
        rows.position.append(position)
        rows.kept.append(kept)
        return len(rows.token) - 1

    for position in range(trunk.prompt_length - 1, len(trunk.ids)):
        row = add(trunk.ids[position], position, True)
        for member in places.get(position, ()):
            if labels[trunk.members[member]].draft_id == trunk.ids[position]:
                rows.own[member] = row
        for member in places.get(position + 1, ()):
            token, rows.judge[member] = labels[trunk.members[member]].draft_id, row
            if token != trunk.ids[position + 1]:
                rows.own[member] = add(token, position + 1, False)
    return rows


@torch.inference_mode()
def read_trunks(
    target: Decoder, cache: KVCache, texts: Sequence[Trunk], labels: Sequence[Label], num_tokens: int, found: Features
) -> None:
    """Read trunks with their leaves, ROWS rows of each a pass, and write what their members need into `found`."""
    prompts = {seq: text.ids[: text.prompt_length] for seq, text in enumerate(texts)}
    read_prompts(target, cache, prompts, prefill_chunk(target.device))
    left = {seq: lay_out(text, labels) for seq, text in enumerate(texts)}
    start = 0
    while left:
        groups = [group_of(cache, seq, rows, slice(start, start + ROWS)) for seq, rows in left.items()]
        hidden, taps = target.forward(place(cache, groups), cache, tuple(found.hidden))
        # of what is judged in this pass: the member, and the row
        judges, owns = list[tuple[int, int]](), list[tuple[int, int]]()
        first = -start
        for group, (seq, rows) in zip(groups, left.items(), strict=True):
            for wanted, places in ((judges, rows.judge), (owns, rows.own)):
                pairs = zip(texts[seq].members, places, strict=True)
                wanted += [(index, first + row) for index, row in pairs if start <= row < start + ROWS]
            first += len(group.tokens)
        if owns:
            members, rows_of = torch.tensor(owns).T
            for layer, tap in taps.items():
                found.hidden[layer][members] = tap[rows_of.to(tap.device)].float().cpu()
        if judges:
            members, rows_of = torch.tensor(judges).T
            token = torch.tensor([labels[index].draft_id for index in members.tolist()])
            write_scalars(target.logits(hidden[rows_of.to(hidden.device)])[:, :num_tokens], token, members, found)
        going = {seq: rows for seq, rows in left.items() if len(rows.token) > start + ROWS}
        if going:
            kept = {
                seq: [i for i, stays in enumerate(rows.kept[start : start + ROWS]) if stays]
                for seq, rows in going.items()
            }
            commit_forest(cache, list(kept.items()))
        left, start = going, start + ROWS


def group_of(cache: KVCache, seq: int, rows: Rows, part: slice) -> RowGroup:
    """Some of a trunk's rows: each sees itself, and the trunk's before its position."""
    kept, position = torch.tensor(rows.kept[part]), torch.tensor(rows.position[part])
    mask = kept[None] & (position[None] < position[:, None]) | torch.eye(len(kept), dtype=torch.bool)
    return RowGroup(seq, rows.token[part], (position - cache.lengths[seq]).tolist(), mask)


def write_scalars(logits: Tensor, token: Tensor, members: Tensor, found: Features) -> None:
    """The scalars of judging rows `[n, V]` for tokens `[n]`, as members `[n]` of `found`."""
    stats = row_stats(logits)
    logit = logits[torch.arange(len(token), device=logits.device), token.to(logits.device)]
    values = {"entropy": stats.entropy, "probability": (logit - stats.lse).exp(), "margin": stats.margin}
    for name, value in values.items():
        found.scalars[name][members] = value.cpu()
    found.choice[members] = stats.top_id[:, 0].long().cpu()
