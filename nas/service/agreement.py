"""Do two runtimes order layouts alike? Rank correlations of what a study measured on both."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from nas.core.measurement import Figure
from nas.core.scoring import Place
from nas.service.record import StudyRecord

METRICS = ("latency", "ttft", "decode_p50", "peak_rss")
FEWEST = 5
"""Layouts: with fewer, the interval of Kendall's tau has no width at all."""
_NORMAL_95 = 1.959964

Floats = NDArray[np.float64]


class Coefficient(BaseModel):
    """A rank correlation from -1, the reverse order, to 1, the same, with its 95 % interval."""

    model_config = ConfigDict(frozen=True)

    value: float
    low: float
    high: float


class RankCorrelation(BaseModel):
    """How far two rankings of the same layouts agree."""

    model_config = ConfigDict(frozen=True)

    layouts: int
    spearman: Coefficient | None = None
    """Of ranks; ties share the mean of theirs."""
    kendall: Coefficient | None = None
    """Tau-b: pairs in the same order minus pairs in the other, over what ties leave."""
    reason: str | None = None
    """Why there is no coefficient."""


class Agreement(BaseModel):
    """Two runtimes' order of the layouts that both measured."""

    model_config = ConfigDict(frozen=True)

    runtimes: tuple[str, str]
    device: str
    workload: str
    metric: str
    correlation: RankCorrelation
    noisy: int
    """Layouts left out because one of the two was measured under noise."""
    apart: int
    """Pairs of layouts that both runtimes tell apart: their 95 % intervals do not meet on either."""
    alike: int
    """Of those, the pairs in the same order on both."""


def agreements(record: StudyRecord) -> list[Agreement]:
    """One for every pair of the space's runtimes, device, measured workload and metric of `METRICS`."""
    space = record.space
    pairs = itertools.combinations([runtime.name for runtime in space.runtimes], 2)
    return [
        _agreement(record, first, second, device, workload, metric)
        for (first, second), device, workload, metric in itertools.product(
            pairs, space.devices, space.measured, METRICS
        )
    ]


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> RankCorrelation:
    """Spearman's rho and Kendall's tau-b of two rankings of the same layouts, in the same order.

    Intervals are those of Fisher's z with the standard errors of Bonett and Wright (2000), sqrt((1 + rho^2 / 2) /
    (n - 3)) and sqrt(0.437 / (n - 4)). A perfect order has an infinite z: its interval is that of the next one,
    in which two neighbours have changed places, up to 1.
    """
    found, n = spearman(first, second), len(first)
    if found.spearman is None:
        return found
    tau = _cosine(_signs(first), _signs(second))
    kendall = _coefficient(tau, 1 - 4 / (n * (n - 1)), math.sqrt(0.437 / (n - 4)))
    return found.model_copy(update={"kendall": kendall})


def spearman(first: Sequence[float] | Floats, second: Sequence[float] | Floats) -> RankCorrelation:
    """Spearman's rho alone, which takes n log n of time for n layouts."""
    n = len(first)
    assert n == len(second)
    if n < FEWEST:
        return RankCorrelation(layouts=n, reason=f"{n} layouts; a rank correlation needs {FEWEST}")
    a, b = _ranks(first), _ranks(second)
    if not a.any() or not b.any():
        return RankCorrelation(layouts=n, reason="all layouts have the same value on one of the two")
    rho, swapped = _cosine(a, b), 1 - 12 / (n * (n * n - 1))
    near = min(abs(rho), swapped)
    error = math.sqrt((1 + near * near / 2) / (n - 3))
    return RankCorrelation(layouts=n, spearman=_coefficient(rho, swapped, error))


def _ranks(values: Sequence[float] | Floats) -> Floats:
    """Twice the rank's distance from the middle one, a whole number; ties share the mean of theirs."""
    _, where, counts = np.unique(np.asarray(values, np.float64), return_inverse=True, return_counts=True)
    below = np.cumsum(counts) - counts
    return np.asarray((2.0 * below + counts - len(values))[where], np.float64)


def _signs(values: Sequence[float]) -> Floats:
    column = np.asarray(values, np.float64)
    signs: Floats = np.sign(column[:, None] - column[None, :])
    return signs


def _cosine(a: Floats, b: Floats) -> float:
    # Sums of integers, exact: equal orders give 1 and no less.
    return float((a * b).sum() / math.sqrt(float((a * a).sum() * (b * b).sum())))


def _coefficient(value: float, swapped: float, error: float) -> Coefficient:
    z = math.atanh(math.copysign(min(abs(value), swapped), value))
    low, high = math.tanh(z - _NORMAL_95 * error), math.tanh(z + _NORMAL_95 * error)
    return Coefficient(value=value, low=-1.0 if value <= -1 else low, high=1.0 if value >= 1 else high)


def _agreement(record: StudyRecord, first: str, second: str, device: str, workload: str, metric: str) -> Agreement:
    here, there = Place(device, first, workload), Place(device, second, workload)
    taken = [each.measurements for each in record.records.values()]
    both = [(each[here], each[there]) for each in taken if here in each and there in each]
    calm = [(one.figures[metric], other.figures[metric]) for one, other in both if not (one.noisy or other.noisy)]
    values = [(one.value, other.value) for one, other in calm if one.value is not None and other.value is not None]
    orders = [(_order(a, b), _order(c, d)) for (a, c), (b, d) in itertools.combinations(calm, 2)]
    apart = [one == other for one, other in orders if one and other]
    return Agreement(
        runtimes=(first, second),
        device=device,
        workload=workload,
        metric=metric,
        correlation=rank_correlation([one for one, _ in values], [other for _, other in values]),
        noisy=len(both) - len(calm),
        apart=len(apart),
        alike=sum(apart),
    )


def _order(a: Figure, b: Figure) -> int:
    """1 where `a` is surely above `b`, -1 where it is below, 0 where their intervals meet or are not known."""
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return 0
    return int(a.low > b.high) - int(a.high < b.low)
