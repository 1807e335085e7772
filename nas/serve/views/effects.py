"""View model of the effects of knobs on the objectives, and of slices through the search's model."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from nas.core.stats import Z95
from nas.infra.store.store import Store
from nas.search.analysis.axes import AxisView
from nas.search.analysis.effects import Effects, effects, features
from nas.search.analysis.slices import Slice, study_slices
from nas.search.analysis.snapshot import StudySnapshot
from nas.serve.views.base import Interval, View, objective_value

MOST_FITTED_NOW = 500
"""Trials of the largest study whose model is fitted for a page: larger ones take too long."""
_MOST_FITTED = 2000
"""Trials that effects of knobs are fitted to."""
_MOST_SLICES = 4
"""Knobs with slices."""


class KnobView(View):
    """A knob of the space, as the trials have it."""

    name: str
    least: float
    greatest: float
    effects: list[Interval | None] = Field(
        description="for each objective, its change from the least to the greatest value, all others equal: in percent "
        "of a figure, or in the objective's unit for a quality; more is more; null where too few trials have a value, "
        "or other knobs determine the knob"
    )


class SliceView(View):
    """Forecasts by the search's model of layouts of the front that are changed in one knob alone."""

    knob: str
    values: list[float] = Field(description="of the knob, ascending")
    layouts: list[int] = Field(description="trials that are changed")
    predicted: list[list[Interval]] = Field(
        description="for each objective, at each value: the mean of these layouts (geometric where the objective is "
        "compared by ratios), in an interval that holds however their errors are correlated"
    )


class EffectsView(View):
    """Which knobs move the objectives: effects by a linear model of the newest trials, slices by the search's model."""

    objectives: list[str]
    units: list[str] = Field(description="of the effects")
    explained: list[float | None] = Field(description="share of the variance of left-out trials that is predicted")
    knobs: list[KnobView] = Field(description="those with an effect on some objective first")
    slice_units: list[str] = Field(description="of the predictions in `slices`")
    slices: list[SliceView] = Field(
        description="of the knobs that change an objective most, in standard deviations of the trials, along the slice"
    )
    no_slices: str | None = Field(description="why there are none; null if there are")


def effects_view(store: Store, study: StudySnapshot, most: float = math.inf) -> EffectsView:
    """Returns the effects of knobs on the objectives, from the newest trials; computed once for each snapshot.

    A model is fitted for slices in studies of up to `most` trials.
    """
    return study.cached(("effects", most), lambda: _effects_view(store, study, most))


def _effects_view(store: Store, study: StudySnapshot, most: float) -> EffectsView:
    objectives, numbers = [axis for axis in study.axes if axis.objective], range(len(study.table))[-_MOST_FITTED:]
    columns = features(study.space, [study.records[number].layout for number in numbers])
    table = np.column_stack([*columns.values()]) if columns else np.empty((len(numbers), 0))
    fitted = [effects(table, study.table["axes"][numbers, index, 1]) for index in range(len(objectives))]
    knobs = [
        KnobView(
            name=name,
            least=float(column.min()),
            greatest=float(column.max()),
            effects=[fit and _effect(fit, place, axis) for fit, axis in zip(fitted, objectives, strict=True)],
        )
        for place, (name, column) in enumerate(columns.items())
    ]
    slices, reason = _slices(store, study, most)
    return EffectsView(
        objectives=[axis.name for axis in objectives],
        units=["%" if axis.transform == "log" else axis.unit for axis in objectives],
        explained=[fit and round(fit.explained, 2) for fit in fitted],
        knobs=sorted(
            knobs, key=lambda knob: not any(effect and effect.low * effect.high > 0 for effect in knob.effects)
        ),
        slice_units=[axis.unit for axis in objectives],
        slices=slices,
        no_slices=reason,
    )


def _slices(store: Store, study: StudySnapshot, most: float) -> tuple[list[SliceView], str | None]:
    """Returns the slices of the knobs that move an objective most, or none and the reason."""
    if (count := len(study.records)) > most:
        return [], f"a model of {count} trials is not fitted for a page; 'nas study effects {study.name}' fits it"
    by_knob, reason = study_slices(store, study)
    spread = np.nanstd(study.table["axes"][:, :, 1], axis=0) if by_knob else np.ones(1)
    by_knob.sort(key=lambda along: -float((np.ptp(along.mean, axis=0) / np.maximum(spread, 1e-9)).max()))
    if not by_knob and reason is None:
        reason = "no layout of the front can take all values of a knob"
    return [_slice(study, along) for along in by_knob[:_MOST_SLICES]], reason


def _slice(study: StudySnapshot, along: Slice) -> SliceView:
    half = Z95 * along.sd
    ends = np.stack([along.mean, along.mean - half, along.mean + half], axis=-1)

    def predicted(index: int, coordinates: NDArray[np.float64]) -> Interval:
        value, one, other = (objective_value(study, index, float(coordinate)) for coordinate in coordinates)
        return _rounded(value, min(one, other), max(one, other), digits=4)

    return SliceView(
        knob=along.knob,
        values=[*along.values],
        layouts=[*along.layouts],
        predicted=[[predicted(index, row) for row in ends[:, index]] for index in range(ends.shape[1])],
    )


def _effect(fit: Effects, place: int, axis: AxisView) -> Interval | None:
    """Returns an effect in percent, or turned so that more is more for a maximised objective; None: no effect."""
    if np.isnan(fit.change[place]):
        return None
    ends = np.array([fit.change[place], fit.low[place], fit.high[place]])
    if axis.direction == "max":  # coordinates are minimised
        ends = -ends[[0, 2, 1]]
    if axis.transform == "log":
        ends = 100 * np.expm1(ends)
    value, low, high = ends.tolist()
    return _rounded(value, low, high, digits=3)


def _rounded(value: float, low: float, high: float, digits: int) -> Interval:
    value, low, high = (float(f"{end:.{digits}g}") for end in (value, low, high))
    return Interval(value=value, low=low, high=high)
