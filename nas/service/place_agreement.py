"""Do two places order a live study's layouts alike? Rank correlations of what was measured at both."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from nas.service.agreement import RankCorrelation, spearman
from nas.service.live_axes import AxisView
from nas.service.live_points import values
from nas.service.live_study import LiveStudy
from nas.service.live_table import ORIGINS


class PlaceAgreement(BaseModel):
    """Two places' order of the layouts that both measured; noisy ones and references are left out."""

    metric: str
    workload: str | None
    places: tuple[str, str]
    correlation: RankCorrelation


def place_agreements(study: LiveStudy) -> list[PlaceAgreement]:
    """One for every figure and pair of places that an axis tells of; the study's lock is held."""
    return list(_agreements(study))


def _agreements(study: LiveStudy) -> Iterator[PlaceAgreement]:
    rows = study.table.rows
    counted = (rows["origin"] != ORIGINS.index("reference")) & ~rows["noisy"]
    by_figure: dict[tuple[str, str | None], list[AxisView]] = {}
    for axis in study.axes:
        if axis.place is not None:
            by_figure.setdefault((axis.metric, axis.workload), []).append(axis)
    for (metric, workload), found in by_figure.items():
        columns = [(axis.place or "", values(study, axis.key)[counted]) for axis in found]
        for (here, one), (there, other) in itertools.combinations(columns, 2):
            yield PlaceAgreement(
                metric=metric, workload=workload, places=(here, there), correlation=_correlation(one, other)
            )


def _correlation(one: NDArray[np.float64], other: NDArray[np.float64]) -> RankCorrelation:
    both = np.isfinite(one) & np.isfinite(other)
    return spearman(one[both], other[both])
