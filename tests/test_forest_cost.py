"""What a round of a forest costs the host does not depend on the number of sequences: neither the operators that it
launches nor how often it waits. And the numbers of rows are those of the reference, however they are made."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_forest import pair_of
from tiny import Make, random_classifier, some_ids
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pad_engine import SamplingParams, record, verify
from pad_engine.forest import Forest, Pair
from pad_engine.forest_request import ForestRequest
from pad_engine.kernels.row_stats import row_stats_ref
from pad_engine.models.decoder import Decoder
from pad_engine.record import Record, row_stats
from pad_engine.rules.override import Judged, on_host
from pad_engine.rules.select import bind
from pad_engine.training.baselines import make_any_rule
from pad_engine.tree import DraftTree, make_forest

DEPTH, TOKENS = 4, 40
RULES = (
    "greedy", "margin:form=gap,m=0.5", "pivot:sigma=0.5", "typical:eps=0.01", "topk:k=5", "fly:theta=0.1,lookahead=1",
    "entropy:h=1", "random:rate=0.5", "kl:t=2",
)  # fmt: skip


class Counter(TorchDispatchMode):
    """Counts operators, and how often the host waits for a number of a tensor."""

    operators = waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        self.waits += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    """One that also knows of the transfers that are no operators on a CPU."""
    counter = Counter()

    def counted(name: str) -> Any:
        plain = getattr(Tensor, name)

        def call(self: Tensor) -> Any:
            counter.waits += 1
            return plain(self)

        return call

    for name in ("tolist", "cpu"):
        monkeypatch.setattr(Tensor, name, counted(name))
    yield counter


def costs(counter: Counter, pair: Pair, rule: Any, batch: int) -> tuple[int, int, int]:
    """Operators and waits of the third round, when nothing begins or ends, and the overrides of all."""
    forest = Forest(pair, rule=rule, depth=DEPTH, batch=batch, max_length=64)
    for i in range(batch):
        forest.add(ForestRequest(some_ids(3 + i % 5, i), SamplingParams(TOKENS, seed=i, ignore_eos=True), i))
    forest.step()
    forest.step()
    counter.operators = counter.waits = 0
    with counter:
        assert not forest.step()
    return counter.operators, counter.waits, sum(len(one.overrides) for alike in forest.running for one in alike)


@pytest.mark.parametrize("spec", RULES)
def test_a_round_costs_no_more_for_more_sequences(
    spec: str, make_model: Make, tmp_path: Path, counter: Counter
) -> None:
    pair = pair_of(make_model)
    decoder = pair.target.decoder
    if spec.startswith("pivot"):
        spec += f",floor=0,model={random_classifier(tmp_path, 'pivot-mlp', decoder.config.hidden_size, 1)}"
    rule = bind(make_any_rule(spec, pair.target.num_tokens), decoder, pair.target.num_tokens)
    few, many = costs(counter, pair, rule, 8), costs(counter, pair, rule, 32)
    # lists of overrides are made where there are any
    assert abs(many[0] - few[0]) < 12 and abs(many[1] - few[1]) <= 1, (few, many)
    assert many[1] <= 8
    assert spec == "greedy" or many[2] > 8


def odd_rows() -> Tensor:
    """Ties, impossible tokens, up to all but one, and rows that are not finite."""
    rows = torch.randn(60, 23)
    rows[:20] = rows[:20].round()
    rows[10:30] = rows[10:30].masked_fill(torch.rand(20, 23) < 0.6, -torch.inf)
    rows[30:40] = -torch.inf
    rows[range(30, 40), range(10)] = 1.0
    rows[40] = 0.0
    rows[41, [3, 9]] = torch.nan
    rows[42, 5] = torch.inf
    return rows


@pytest.mark.parametrize("top", [3, 8])
@pytest.mark.parametrize("entries", [1, 23 * 7, 1 << 26])
def test_statistics_are_those_of_a_full_sort(monkeypatch: pytest.MonkeyPatch, top: int, entries: int) -> None:
    monkeypatch.setattr(record, "ENTRIES", entries)
    rows = odd_rows()
    # columns that are left out, as those of a padded vocabulary
    for given in (rows, torch.cat((rows, rows), 1)[:, :23]):
        for name, ours, reference in zip(
            ("id", "logit", "lse", "entropy", "margin"), row_stats(given, top), row_stats_ref(given, top), strict=True
        ):
            torch.testing.assert_close(ours, reference, atol=0, rtol=0, equal_nan=True, msg=name)


def test_logits_in_parts_are_the_same(make_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = pair_of(make_model).target.decoder
    hidden = torch.randn(11, decoder.config.hidden_size)
    whole = verify.logits_of(decoder, hidden, 280)
    monkeypatch.setattr(record, "ENTRIES", 4 * decoder.config.vocab_size)
    parts = verify.logits_of(decoder, hidden, 280)
    assert parts.shape == whole.shape == (11, 280)
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("entries", [1, 1 << 26])
def test_divergence_is_the_sum_over_tokens(monkeypatch: pytest.MonkeyPatch, entries: int) -> None:
    """Also with a draft model of fewer tokens, and with a tree that nothing was drawn for."""
    monkeypatch.setattr(record, "ENTRIES", entries)
    trees = [DraftTree.chain([0, 1, 2]), DraftTree.chain([3]), DraftTree.chain([1, 1])]
    logits, first, last = torch.randn(6, 5), torch.randn(3, 4).softmax(-1), torch.randn(2, 4).softmax(-1)
    logits[:2, 4] = logits[5, 4] = -torch.inf
    picks, q_rows = torch.zeros(6).int(), [first, None, last]
    found = Record(make_forest(trees, [0, 1, 2]), logits, logits, picks, {}, q_rows).divergence
    expected = []
    for row, q in zip(logits, [*first, None, *last], strict=True):
        p = row.double().softmax(-1)
        if q is None or p[4] > 0:
            expected.append(float("inf"))
        else:
            expected.append(sum(float(a * (a / b).log()) for a, b in zip(p[:4], q.double(), strict=True) if a > 0))
    assert found == pytest.approx(expected)
    undrawn = Record(make_forest(trees, [0, 1, 2]), logits, logits, picks, {}).divergence
    assert undrawn == [float("inf")] * 6


def test_judged_numbers_move_bit_by_bit() -> None:
    columns = [torch.randint(0, 9, (7,)).int(), torch.randint(0, 1 << 30, (7, 5)).int(), torch.randn(7, 5)]
    judged = Judged(*columns, *odd_rows()[38:45, :4].t())
    for ours, given in zip(on_host(judged), judged, strict=True):
        assert ours.dtype == given.dtype and ours.shape == given.shape
        torch.testing.assert_close(ours, given, atol=0, rtol=0, equal_nan=True)


def test_what_all_prompts_begin_with_is_read_in_a_pass_of_its_own(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the rest of all of them in another, for the prompts of one task: examples, and a question."""
    pair, passes = pair_of(make_model), []
    forward = Decoder.forward

    def counted(self: Decoder, placement: Any, *rest: Any) -> Any:
        passes.append(len(placement.tokens))
        return forward(self, placement, *rest)

    forest = Forest(pair, batch=9, max_length=60)
    for i in range(9):
        forest.add(ForestRequest(some_ids(30, 99) + some_ids(8, i), SamplingParams(4), i))
    monkeypatch.setattr(Decoder, "forward", counted)
    forest.step()
    assert passes == [37, 8 * 7, 9]
