"""Statistics of repeated measurements: interval, percentile, spread.

Times of one process are skewed and positive, so intervals are computed on logarithms: repetitions are the
independent unit (one fresh process each), tokens within a repetition are not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from statistics import fmean, median, stdev

from nas.core.measurement import Figure

Z95 = 1.959964
"""Two-sided 95 % quantile of the normal distribution: half width of an interval in standard errors."""

FASTEST = 5
"""A floor is the mean of the fastest of so many runs: the lowest fifth."""

P95_MIN_TOKENS = 1000
"""Decoded tokens over all repetitions below which no p95 is reported."""


@cache
def t_critical(confidence: float, dof: int) -> float:
    """Returns t with P(|T| <= t) = `confidence` for Student's distribution with `dof` degrees of freedom.

    With whole degrees of freedom the probability is a finite sum in theta = atan(t / sqrt(dof)) (Abramowitz and
    Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4). It increases with theta: bisection finds the root.
    """
    assert 0 < confidence < 1, confidence
    assert dof >= 1, dof
    low, high = 0.0, math.pi / 2
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if _central_probability(middle, dof) < confidence else (low, middle)
    return math.sqrt(dof) * math.tan(middle)


def _central_probability(theta: float, dof: int) -> float:
    """Returns A(t | dof) at t = sqrt(dof) tan(theta)."""
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = dof % 2
    term = cosine if odd else 1.0
    total = term if dof > 1 else 0.0
    for k in range(2 + odd, dof, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    return 2 / math.pi * (theta + sine * total) if odd else sine * total


def interval(value: float, sd: float, transform: str) -> tuple[float, float]:
    """Returns the 95 % interval of a normal value; of `transform` "log", `sd` is that of its logarithm."""
    if transform == "log":
        return value * math.exp(-Z95 * sd), value * math.exp(Z95 * sd)
    return value - Z95 * sd, value + Z95 * sd


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean and the half width of its 95 % interval (Student's t); infinite for a single value."""
    if len(values) < 2:
        return fmean(values), math.inf
    return fmean(values), t_critical(0.95, len(values) - 1) * stdev(values) / math.sqrt(len(values))


def share_interval(hits: int, count: int) -> tuple[float, float]:
    """Returns the 95 % interval of a share (Wilson 1927), whose middle is nearer to a half than the share is.

    Args:
        hits: of `count`.
        count: at least 1.
    """
    share, weight = hits / count, Z95**2 / count
    middle = (share + weight / 2) / (1 + weight)
    half = Z95 * math.sqrt(share * (1 - share) / count + weight / (4 * count)) / (1 + weight)
    return max(0.0, middle - half), min(1.0, middle + half)


def floor(values: Sequence[float]) -> float:
    """Returns the mean of the lowest fifth of `values`: other work only ever makes a run slower."""
    lowest = sorted(values)[: math.ceil(len(values) / FASTEST)]
    return fmean(lowest)


def quantile(values: Sequence[float], q: float) -> float | None:
    """Returns the `q` quantile by linear interpolation of order statistics (Hyndman and Fan 1996, type 7).

    None where there are fewer than 1 / min(q, 1 - q) values: the estimate would be the extreme value itself.
    """
    assert 0 < q < 1, q
    if len(values) * min(q, 1 - q) < 1 - 1e-9:
        return None
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def sum_log_sd(*parts: tuple[float, float]) -> float:
    """Returns the standard deviation of the logarithm of a sum of positive parts, from those of the parts.

    No correlation makes it greater. Parts of one measurement are corrected by the same runs of the reference, so they
    are not independent, and how far they are not is not known.

    Args:
        parts: value, and standard deviation of its logarithm.
    """
    return math.fsum(value * sd for value, sd in parts) / math.fsum(value for value, _ in parts)


def repetition_figure(per_repetition: Sequence[float], unit: str, reason: str = "no valid repetition") -> Figure:
    """Returns the median of one positive value per repetition, with range and 95 % t-interval on logarithms.

    The standard error of the median is taken as that of the mean times sqrt(pi / 2), as for normal values. `log_sd` is
    that of a normal variable with the same interval: chances count, too, that few repetitions hardly tell the noise.
    No value where a repetition has none above 0.
    """
    if not all(0 < value < math.inf for value in per_repetition):
        reason = "a repetition reported a number that is not above 0, or is infinite"
        return Figure(value=None, unit=unit, n=len(per_repetition), reason=reason)
    figure = _figure(per_repetition, unit, reason)
    if figure.value is None or figure.n < 2:
        return figure
    error = math.sqrt(math.pi / 2 / figure.n) * stdev(map(math.log, per_repetition))
    sd = t_critical(0.95, figure.n - 1) * error / Z95
    low, high = (figure.value * math.exp(off * sd) for off in (-Z95, Z95))
    return figure.model_copy(update={"low": low, "high": high, "log_sd": sd})


def _figure(values: Sequence[float], unit: str, reason: str) -> Figure:
    if not values:
        return Figure(value=None, unit=unit, n=0, reason=reason)
    return Figure(value=median(values), minimum=min(values), maximum=max(values), n=len(values), unit=unit)
