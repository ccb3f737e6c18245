"""What counts of right and wrong answers say for sure: exact binomial bounds, and an interval for paired answers.

The bounds are those of Clopper and Pearson (Biometrika 26, 1934): the rates under which a count so small, or so large,
is not yet less likely than one minus the confidence. They hold for every n. Next to read: calibrate.py.
"""

import math
from collections.abc import Callable
from statistics import NormalDist


def upper_bound(count: int, n: int, confidence: float) -> float:
    """The largest rate that `count` of n leaves possible: P(X <= count | n, rate) = 1 - confidence.

    confidence: one-sided, in (0, 1)."""
    check_count(count, n, confidence)
    if count == n:
        return 1.0
    return crossing(lambda rate: 1 - confidence - binomial_cdf(count, n, rate), count / n, 1.0)


def lower_bound(count: int, n: int, confidence: float) -> float:
    """The same from below."""
    return 1.0 - upper_bound(n - count, n, confidence)


def interval(count: int, n: int, confidence: float) -> tuple[float, float]:
    """The exact two-sided interval of a rate, half of what may fail on each side."""
    side = (1 + confidence) / 2
    return lower_bound(count, n, side), upper_bound(count, n, side)


def max_count(n: int, rate: float, confidence: float) -> int:
    """The largest count whose upper bound is at most `rate`; -1 when not even 0 is enough."""
    count = -1
    while count + 1 < n and binomial_cdf(count + 1, n, rate) <= 1 - confidence:
        count += 1
    return count


def min_questions(count: int, rate: float, confidence: float) -> int:
    """The least n of which `count` have an upper bound of at most `rate`: 299 for none at 0.01 and 95 %."""
    check_count(count, max(count, 1), confidence)
    if not 0 < rate < 1:
        raise ValueError(f"rate must be in (0, 1), got {rate}")
    low, high = count, count + 1
    while binomial_cdf(count, high, rate) > 1 - confidence:
        low, high = high, 2 * high
    # the bound falls with n, so the first n lies in (low, high]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if binomial_cdf(count, middle, rate) > 1 - confidence else (low, middle)
    return high


def paired_interval(gained: int, lost: int, n: int, confidence: float) -> tuple[float, float]:
    """An interval for the net difference of two rates on the same n questions, (gained - lost) / n, in [-1, 1].

    gained, lost: questions that only the second, and only the first, has right. It is the score interval of Tango
    (Statistics in Medicine 17, 1998): every difference d that the score test does not reject at 1 - confidence. Unlike
    (gained - lost) / n +- 1.96 standard errors it has a width when both are 0, and stays inside [-1, 1]. It is not
    exact: at 95 % and n from 6 to 20 it covers the truth in at least 93 % of all cases (tests/test_bounds.py)."""
    check_count(gained + lost, n, confidence)
    z, estimate = NormalDist().inv_cdf((1 + confidence) / 2), (gained - lost) / n

    def excess(difference: float) -> float:
        return abs(score(gained, lost, n, difference)) - z

    low = -1.0 if lost == n else -crossing(lambda d: excess(-d), -estimate, 1.0)
    high = 1.0 if gained == n else crossing(excess, estimate, 1.0)
    return low, high


def score(gained: int, lost: int, n: int, difference: float) -> float:
    """Tango's statistic for a supposed difference in (-1, 1), with the likeliest share of lost questions under it."""
    d = difference
    b = -gained - lost + (2 * n - gained + lost) * d
    c = -lost * d * (1 - d)
    share = (math.sqrt(max(b * b - 8 * n * c, 0.0)) - b) / (4 * n)
    variance = n * (2 * share + d * (1 - d))
    deviation = gained - lost - n * d
    if variance <= 0:
        return math.copysign(math.inf, deviation) if deviation else 0.0
    return deviation / math.sqrt(variance)


def sign_test(first: int, second: int) -> float:
    """How likely an even coin shows its first side so often or more often, of first + second throws: McNemar's test for
    paired answers, one-sided and exact."""
    # so many first sides are as likely as so many second ones; 1 - cdf would lose all that is small
    return binomial_cdf(second, first + second, 0.5)


def crossing(rises: Callable[[float], float], low: float, high: float) -> float:
    """Where a function that is negative at `low` and does not fall becomes positive, by bisection to the last bit."""
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if rises(middle) < 0 else (low, middle)
    return high


def binomial_cdf(count: int, n: int, rate: float) -> float:
    """P(X <= count) of n trials. The tail that does not hold the mean is summed from its largest term on, so nothing
    cancels and nothing underflows."""
    if count < 0:
        return 0.0
    if count >= n:
        return 1.0
    if count > n * rate:
        return 1.0 - tail(n - count - 1, n, 1.0 - rate)
    return tail(count, n, rate)


def tail(count: int, n: int, rate: float) -> float:
    """P(X <= count) where count is not above the mean: the terms fall towards 0."""
    if rate >= 1:
        return 0.0
    log_term = math.lgamma(n + 1) - math.lgamma(count + 1) - math.lgamma(n - count + 1)
    term = math.exp(log_term + (count * math.log(rate) if count else 0.0) + (n - count) * math.log1p(-rate))
    total, odds = 0.0, (1 - rate) / rate if count else 0.0
    for x in range(count, -1, -1):
        total += term
        if term <= total * 1e-18:
            break
        term *= x * odds / (n - x + 1)
    return total


def check_count(count: int, n: int, confidence: float) -> None:
    """ValueError unless the count is one of n and the confidence a probability."""
    if n < 1 or not 0 <= count <= n:
        raise ValueError(f"the count must be in [0, n] and n at least 1, got {count} of {n}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be in (0, 1), got {confidence}")
