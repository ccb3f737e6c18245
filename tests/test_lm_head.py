"""The LM head: its logits are close to the reference's, and its picks are exactly the definition's of those logits."""

import pytest
import torch
from launches import (
    CUDA,
    DEVICE,
    EPS,
    MODES,
    ROWS,
    assert_rows_close,
    bits,
    cases,
    ints,
    nans,
    normal,
    normed_input,
    repeat,
)
from torch import Tensor

from pad_engine.kernels.gumbel import gumbel_pick_ref, gumbel_ref
from pad_engine.kernels.lm_head import Judging, lm_head, lm_head_programs, lm_head_ref
from pad_engine.kernels.row_stats import TOP, empty_parts, row_stats_ref
from pad_engine.kernels.tuning import TileConfig

INF = torch.inf
# ids, width, cut, programs: one tile a program or many, in even and uneven shares
CASES = [
    (300, 48, TileConfig(64, 64), 2),
    (131, 50, TileConfig(32, 32, stages=1, group=8), 3),
    (131, 112, TileConfig(16, 32, stages=2), 9),
]
if CUDA:
    CASES += [
        (49152, 576, TileConfig(64, 64, stages=3), 264),
        (5003, 2048, TileConfig(32, 128, stages=4, prefetch=256), 132),
    ]


class Head:
    """Inputs of a launch over the rows of three sequences, each with a length, a seed and a temperature of its own."""

    def __init__(self, rows: int, vocab: int, k: int, dtype: torch.dtype, temperatures: list[float]) -> None:
        self.rows, self.vocab, self.temperatures, self.pdl = rows, vocab, temperatures, MODES[rows // 32 % len(MODES)]
        self.h, self.norm, self.normed, self.squares = normed_input(rows, k, dtype, dtype)
        self.weight = normal(vocab, k, dtype=dtype) / k**0.5 * 4
        self.depth = ints(torch.randint(20, (rows,)))
        self.seq = ints(torch.arange(rows) * 3 // rows)
        self.length = ints([0, 700, 2**20])
        self.seeds = [3, 2**63 - 5, -7]

    def launch(
        self, config: TileConfig, programs: int, logits: Tensor | None, softcap: float | None = None,
        row_ids: Tensor | None = None, judging: Judging | None = None,
    ) -> tuple:  # fmt: skip
        """(scores, ids) that the kernel leaves. row_ids: of the rows that the head has, which are then no others."""
        own = self.weight if row_ids is None else self.weight[row_ids.long()]
        scores, ids = nans(programs, self.rows), torch.full((programs, self.rows), -77, dtype=torch.int32).to(DEVICE)
        # ids from `vocab` on are padding: their weights are not even numbers
        weight = torch.cat([own, nans(3, own.shape[1], dtype=own.dtype)])
        seed, temperature = ints(self.seeds, torch.int64), torch.tensor(self.temperatures, device=DEVICE)

        def launch() -> None:
            lm_head(
                self.h, self.norm, self.normed, self.squares, weight, None, self.depth, self.seq, self.length, seed,
                temperature, scores, ids, logits, judging, num_tokens=len(own), row_ids=row_ids, eps=EPS,
                softcap=softcap, config=config, pdl=self.pdl,
            )  # fmt: skip

        repeat(launch, scores, ids)
        return scores, ids

    @property
    def positions(self) -> Tensor:
        """Of the token picked after each row."""
        return self.length[self.seq.long()] + self.depth + 1

    def scores(self, logits: Tensor) -> Tensor:
        """fp32 `[rows, vocab]` by the definition."""
        rows = zip(self.positions, self.seq.tolist(), strict=True)
        noise = [gumbel_ref(self.seeds[s], p[None], self.vocab) * self.temperatures[s] for p, s in rows]
        return logits + torch.cat(noise)

    def picks(self, logits: Tensor) -> list[int]:
        """By the definition."""
        rows = zip(logits, self.positions, self.seq.tolist(), strict=True)
        return [int(gumbel_pick_ref(z[None], p[None], self.seeds[s], self.temperatures[s])) for z, p, s in rows]


def combine(scores: Tensor, ids: Tensor) -> list[int]:
    """The pick of each row, as the accept kernel puts the programs' parts together."""
    best = scores.amax(0)
    lowest = torch.where(scores == best, ids, 2**31 - 1).amin(0)
    return torch.where(best.isfinite(), lowest, -1).tolist()


@pytest.mark.parametrize(("rows", "dtype", "case", "softcap"), cases(CASES, [None, 3.0]), ids=str)
def test_every_part_is_the_definitions(rows: int, dtype: torch.dtype, case: tuple, softcap: float | None) -> None:
    vocab, k, config, programs = case
    head = Head(rows, vocab, k, dtype, [0.0, 0.8, 1.7])
    logits = nans(rows, vocab)
    scores, ids = head.launch(config, programs, logits, softcap)
    assert_rows_close(logits, lm_head_ref(head.h, head.norm, head.weight, None, EPS, softcap), dtype)
    tile = torch.arange(vocab, device=DEVICE) // config.block
    whole = head.scores(logits)
    for program in range(programs):
        own = whole.masked_fill(tile % programs != program, -INF)
        assert torch.equal(bits(scores[program]), bits(own.amax(1)))
        assert torch.equal(ids[program].long(), (own == own.amax(1, keepdim=True)).int().argmax(1))
    assert combine(scores, ids) == head.picks(logits)


@pytest.mark.parametrize("temperatures", [[0.0] * 3, [1e-40, 0.7, 1e30]], ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_picks_do_not_depend_on_who_asks_for_logits(rows: int, temperatures: list[float]) -> None:
    vocab, k, config, programs = CASES[0]
    head = Head(rows, vocab, k, torch.float32, temperatures)
    logits, rounded = nans(rows, vocab), nans(rows, vocab, dtype=torch.float16)
    first, again, unasked = (head.launch(config, programs, z) for z in (logits, rounded, None))
    assert combine(*first) == head.picks(logits)
    assert torch.equal(rounded, logits.half())
    for other in (again, unasked):
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("rows", ROWS)
def test_a_head_of_some_tokens_picks_among_them(rows: int) -> None:
    """Noise and ids are the tokens', whatever the place of their rows; of all tokens nothing changes."""
    vocab, k, config, programs = CASES[0]
    head = Head(rows, vocab, k, torch.float32, [0.0, 0.8, 1.7])
    whole = head.launch(config, programs, None)
    for first, second in zip(whole, head.launch(config, programs, None, row_ids=ints(range(vocab))), strict=True):
        assert torch.equal(bits(first), bits(second))
    chosen = torch.randperm(vocab)[:150].sort().values.to(DEVICE)
    logits, stats = nans(rows, len(chosen)), empty_parts(programs, rows, DEVICE)
    scores, ids = head.launch(config, programs, logits, row_ids=chosen.int(), judging=Judging(stats, scored=True))
    full = torch.full((rows, vocab), -INF, device=DEVICE).index_copy(1, chosen, logits)
    assert combine(scores, ids) == head.picks(full) and set(combine(scores, ids)) <= set(chosen.tolist())
    ranked = row_stats_ref(head.scores(full)).top_id
    places = stats.values[:, 3:].transpose(1, 2).permute(1, 0, 2).reshape(rows, -1).argsort(1, descending=True)
    named = stats.ids.transpose(1, 2).permute(1, 0, 2).reshape(rows, -1).gather(1, places)
    assert torch.equal(named[:, :TOP], ranked)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("rows", ROWS)
def test_a_nan_is_an_infinite_score(rows: int, temperature: float) -> None:
    """That of one id spoils every row; that of a row, this row alone. So does an infinity, but not a negative one."""
    vocab, k, config, programs = CASES[0]
    for value, spoils in ((torch.nan, True), (INF, True), (-INF, False)):
        head = Head(rows, vocab, k, torch.float32, [temperature] * 3)
        # one column alone carries the value, with a positive factor
        head.h[:, 0], head.normed[:, 0], head.norm[0] = 1.0, 1.0, 1.0
        head.weight[129] = 0.0
        head.weight[129, 0] = value
        logits = nans(rows, vocab)
        scores, ids = head.launch(config, programs, logits)
        assert logits[:, 129].isfinite().sum() == 0
        # id 129 lies in the third tile, the first program's
        assert bool(scores[0].isposinf().all()) == spoils and bool(scores[1].isfinite().all())
        assert (combine(scores, ids) == [-1] * rows) == spoils
        assert combine(scores, ids) == head.picks(logits)
    head = Head(rows, vocab, k, torch.float32, [temperature] * 3)
    bad = rows // 2
    head.h[bad, 5], head.normed[bad, 5] = torch.nan, torch.nan
    scores, ids = head.launch(config, programs, logits)
    assert scores[:, bad].isposinf().all()
    assert [pick == -1 for pick in combine(scores, ids)] == [row == bad for row in range(rows)]


@pytest.mark.parametrize("rows", ROWS)
def test_of_equal_logits_the_lowest_id_wins(rows: int) -> None:
    """In a tile, in a program's tiles, and between programs. Whole numbers, so that equal rows give equal logits."""
    vocab, k, config, programs = 300, 48, TileConfig(32, 32), 3
    for period in (7, 32, 96, 150):
        head = Head(rows, vocab, k, torch.float32, [0.0] * 3)
        head.h = head.normed = ints(torch.randint(-3, 4, (rows, k)), torch.float32)
        head.norm = torch.ones_like(head.norm)
        kinds = ints(torch.randint(-3, 4, (period, k)), torch.float32)
        head.weight = kinds[torch.arange(vocab) % period].contiguous()
        logits = nans(rows, vocab)
        picks = combine(*head.launch(config, programs, logits))
        assert picks == logits.argmax(1).tolist() == head.picks(logits)
        assert max(picks) < period


def test_programs_fill_the_card_and_no_more() -> None:
    assert lm_head_programs(49152, TileConfig(64, 64, per_core=2), 132) == 264
    assert lm_head_programs(300, TileConfig(64, 64, per_core=2), 132) == 5
    assert lm_head_programs(301, TileConfig(100, 64), 3) == 3
