"""Rank correlations between two runtimes, over the layouts that a study measured on both."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from pydantic import BaseModel, ConfigDict

from nas.core.measurement import Figure
from nas.core.scoring import MeasurementKey
from nas.core.stats import Z95
from nas.search.analysis.record import StudyRecord

COMPARED = ("latency", "ttft", "decode_p50", "peak_rss")
FEWEST = 5
"""Layouts: with fewer, the interval of Kendall's tau has no width at all."""
_DIGITS = 12
"""Digits of a coefficient: a perfect order gives exactly 1."""


class Coefficient(BaseModel):
    """A rank correlation from -1, the reverse order, to 1, the same, with its 95 % interval."""

    model_config = ConfigDict(frozen=True)

    value: float
    low: float
    high: float


class RankCorrelation(BaseModel):
    """The agreement of two rankings of the same layouts."""

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
    apart: int
    """Pairs of layouts that differ on both runtimes: their 95 % intervals, of their own noise, overlap on neither."""
    alike: int
    """Of those, the pairs in the same order on both."""


def agreements(record: StudyRecord) -> list[Agreement]:
    """Compares every two of the space's runtimes, for each device, measured workload and metric of `COMPARED`."""
    space = record.space
    pairs = [*itertools.combinations(space.labelled, 2)]
    rows = []
    for (first, second), device, workload in itertools.product(pairs, space.devices, space.measured):
        if not {(device, first), (device, second)} <= set(space.targets):
            continue
        keys = MeasurementKey(device, first, workload), MeasurementKey(device, second, workload)
        measurements = [trial.measurements for trial in record.records.values()]
        both = [[by_key[key].figures for key in keys] for by_key in measurements if all(key in by_key for key in keys)]
        for metric in COMPARED:
            figures = [(one[metric], other[metric]) for one, other in both]
            values = [(a.value, b.value) for a, b in figures if a.value is not None and b.value is not None]
            orders, others = (_orders([pair[side] for pair in figures]) for side in (0, 1))
            apart = (orders != 0) & (others != 0)
            rows.append(
                Agreement(
                    runtimes=(first, second),
                    device=device,
                    workload=workload,
                    metric=metric,
                    correlation=rank_correlation([a for a, _ in values], [b for _, b in values]),
                    apart=int(apart.sum()),
                    alike=int((orders == others)[apart].sum()),
                )
            )
    return rows


def _orders(figures: Sequence[Figure]) -> np.ndarray[tuple[int], np.dtype[np.int8]]:
    """Returns for each pair of figures 1 if the first is above, -1 if it is below, 0 if their intervals overlap."""
    measured = [
        (math.nan, math.nan) if figure.value is None or figure.log_sd is None else (figure.value, figure.log_sd)
        for figure in figures
    ]
    value, sd = np.reshape(measured, (-1, 2)).T
    low, high = value * np.exp(-Z95 * sd), value * np.exp(Z95 * sd)
    above, below = low[:, None] > high, high[:, None] < low
    return (above.astype(np.int8) - below)[np.triu_indices(len(low), 1)]


def rank_correlation(first: ArrayLike, second: ArrayLike, *, kendall: bool = True) -> RankCorrelation:
    """Returns Spearman's rho and Kendall's tau-b of two rankings of the same layouts, in the same order.

    Intervals are those of Fisher's z with the standard errors of Bonett and Wright (2000), sqrt((1 + rho^2 / 2) /
    (n - 3)) and sqrt(0.437 / (n - 4)). Of simulated rankings of 12 to 40 layouts 93 to 96 % hold up to a rho of 0.95,
    91 to 95 % up to a tau of 0.7, and 88 to 92 % at a rho of 0.98 and a tau of 0.87. A perfect order has an infinite z:
    its interval is that of the next one, in which two neighbours have changed places, up to 1.

    Args:
        first: [N] values by which the one ranks.
        second: [N] values by which the other ranks.
        kendall: whether to compute tau, too.
    """
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    n = len(a)
    assert n == len(b)
    if n < FEWEST:
        return RankCorrelation(layouts=n, reason=f"{n} layouts; a rank correlation needs {FEWEST}")
    if not np.ptp(a) or not np.ptp(b):
        return RankCorrelation(layouts=n, reason="all layouts have the same value on one of the two")
    from scipy.stats import kendalltau, spearmanr  # type: ignore[import-untyped]  # takes a second to load

    rho, swapped = round(float(spearmanr(a, b).statistic), _DIGITS), 1 - 12 / (n * (n * n - 1))
    near = min(abs(rho), swapped)
    error = math.sqrt((1 + near * near / 2) / (n - 3))
    correlation = RankCorrelation(layouts=n, spearman=_coefficient(rho, swapped, error))
    if not kendall:
        return correlation
    tau = round(float(kendalltau(a, b).statistic), _DIGITS)
    coefficient = _coefficient(tau, 1 - 4 / (n * (n - 1)), math.sqrt(0.437 / (n - 4)))
    return correlation.model_copy(update={"kendall": coefficient})


def _coefficient(value: float, swapped: float, error: float) -> Coefficient:
    z = math.atanh(math.copysign(min(abs(value), swapped), value))
    low, high = math.tanh(z - Z95 * error), math.tanh(z + Z95 * error)
    return Coefficient(value=value, low=-1.0 if value <= -1 else low, high=1.0 if value >= 1 else high)
