"""Exact bounds, against scipy and enumeration; the paired interval, against published figures and its coverage."""

import math

import pytest

from pad_engine.training.bounds import (
    binomial_cdf,
    interval,
    lower_bound,
    max_count,
    min_questions,
    paired_interval,
    sign_test,
    upper_bound,
)


def test_bounds_are_quantiles_of_beta_distributions() -> None:
    beta = pytest.importorskip("scipy.stats", reason="scipy is not installed: bounds NOT compared with it").beta
    for n in (1, 2, 5, 37, 299, 4000, 20000):
        for k in sorted({0, 1, n // 50, n // 3, n // 2, n - 1, n}):
            for confidence in (0.5, 0.9, 0.95, 0.999):
                high = 1.0 if k == n else beta.ppf(confidence, k + 1, n - k)
                low = 0.0 if k == 0 else beta.ppf(1 - confidence, k, n - k + 1)
                assert upper_bound(k, n, confidence) == pytest.approx(high, rel=1e-9, abs=1e-12)
                assert lower_bound(k, n, confidence) == pytest.approx(low, rel=1e-9, abs=1e-12)
    assert interval(13, 40, 0.9) == (lower_bound(13, 40, 0.95), upper_bound(13, 40, 0.95))


@pytest.mark.parametrize("n", [1, 3, 9, 20])
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_bounds_cover_by_enumeration(n: int, confidence: float) -> None:
    """Whatever the rate, the counts whose bound holds have at least the confidence as their probability together; and
    just below a bound the coverage is that and no more, so that no bound could be tighter."""
    bounds = [upper_bound(k, n, confidence) for k in range(n + 1)]
    lows = [lower_bound(k, n, confidence) for k in range(n + 1)]

    def covered(rate: float, holds: list[bool]) -> float:
        return sum(math.comb(n, k) * rate**k * (1 - rate) ** (n - k) for k in range(n + 1) if holds[k])

    for step in range(1, 200):
        rate = step / 200
        assert covered(rate, [rate <= bound for bound in bounds]) >= confidence - 1e-12
        assert covered(rate, [rate >= low for low in lows]) >= confidence - 1e-12
    for k in range(n):
        beyond = bounds[k] + 1e-9
        assert covered(beyond, [beyond <= bound for bound in bounds]) == pytest.approx(confidence, abs=1e-6)


def test_the_cdf_is_that_of_exact_integers() -> None:
    for n in (1, 7, 30):
        for k in range(-1, n + 1):
            for a, b in ((1, 2), (1, 100), (99, 100), (2, 3)):
                exact = sum(math.comb(n, x) * a**x * (b - a) ** (n - x) for x in range(k + 1)) / b**n
                assert binomial_cdf(k, n, a / b) == pytest.approx(exact, rel=1e-11, abs=1e-15)
    assert binomial_cdf(0, 9, 0.0) == binomial_cdf(9, 9, 1.0) == 1.0 and binomial_cdf(8, 9, 1.0) == 0.0


def test_how_many_questions_certify() -> None:
    assert min_questions(0, 0.01, 0.95) == 299 and min_questions(1, 0.01, 0.95) == 473
    assert max_count(4000, 0.02, 0.95) == 65
    for n, rate in ((298, 0.01), (299, 0.01), (472, 0.01), (473, 0.01), (4000, 0.02), (149, 0.02)):
        most = max_count(n, rate, 0.95)
        assert most < 0 or upper_bound(most, n, 0.95) <= rate
        assert upper_bound(most + 1, n, 0.95) > rate
    for count in (0, 1, 5, 40):
        n = min_questions(count, 0.03, 0.9)
        assert upper_bound(count, n, 0.9) <= 0.03 < upper_bound(count, n - 1, 0.9)


def test_the_paired_interval_has_the_published_figures() -> None:
    """Bentur et al. 2009, 1 gained and 7 lost of 21: Tango's interval is (-0.517, -0.026) in Fagerland, Lydersen and
    Laake, Statistical Analysis of Contingency Tables (2017), section 8.6."""
    assert paired_interval(1, 7, 21, 0.95) == pytest.approx((-0.517, -0.026), abs=5e-4)
    z2 = 1.959963984540054**2
    # nothing differs: n d = z sqrt(n |d| (1 - |d|) + ...) has the solution z^2 / (n + z^2)
    assert paired_interval(0, 0, 10, 0.95) == pytest.approx((-z2 / (10 + z2), z2 / (10 + z2)))
    for gained, lost, n in ((10, 0, 10), (3, 2, 40), (0, 9, 4000), (0, 1, 1)):
        low, high = paired_interval(gained, lost, n, 0.95)
        assert -1 <= low <= (gained - lost) / n <= high <= 1 and low < high
        assert paired_interval(lost, gained, n, 0.95) == pytest.approx((-high, -low))
    low, high = paired_interval(40, 65, 4000, 0.95)
    assert (high - low) / 2 < 0.008


@pytest.mark.parametrize("n", [6, 10, 20])
def test_the_paired_interval_covers(n: int) -> None:
    """By enumeration of all tables, over a grid of the two rates: its coverage stays near its level."""
    found = {(g, x): paired_interval(g, x, n, 0.95) for g in range(n + 1) for x in range(n + 1 - g)}
    ways = {(g, x): math.comb(n, g) * math.comb(n - g, x) for g, x in found}
    rates = (0.003, 0.02, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6)
    coverage = [
        sum(
            ways[g, x] * gain**g * loss**x * (1 - gain - loss) ** (n - g - x)
            for (g, x), (low, high) in found.items()
            if low - 1e-12 <= gain - loss <= high + 1e-12
        )
        for gain in rates
        for loss in rates
        if gain + loss < 1
    ]
    assert min(coverage) >= 0.93 and sum(coverage) / len(coverage) >= 0.95


def test_the_sign_test_counts_throws_of_an_even_coin() -> None:
    assert sign_test(0, 5) == 1.0 and sign_test(5, 0) == pytest.approx(1 / 32)
    assert sign_test(3, 2) == pytest.approx((10 + 5 + 1) / 32) and sign_test(0, 0) == 1.0
    assert sign_test(60, 0) == pytest.approx(2.0**-60, rel=1e-9, abs=0)
    assert sign_test(58, 2) == pytest.approx((1 + 60 + 30 * 59) / 2**60, rel=1e-9, abs=0)


@pytest.mark.parametrize(("count", "n", "confidence"), [(-1, 5, 0.9), (6, 5, 0.9), (0, 0, 0.9), (1, 5, 1.0), (1, 5, 0)])
def test_impossible_counts_are_refused(count: int, n: int, confidence: float) -> None:
    with pytest.raises(ValueError, match="must be in"):
        upper_bound(count, n, confidence)
