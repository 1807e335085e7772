"""Two to six candidates of one study side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pydantic import BaseModel, ConfigDict

from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.core.measurement import Figure
from nas.core.metrics import METRICS
from nas.core.scoring import Place, log_sd
from nas.service.candidate_models import CandidateView, PlaceView
from nas.service.candidate_view import candidate_views
from nas.service.layout_alignment import align, differs
from nas.store.store import Store

FEWEST, MOST = 2, 6
_METRICS = ("latency", "ttft", "decode_p50", "decode_p95", "peak_rss", "energy_mj_per_token", "file_size")
_NORMAL_95 = 1.959964


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class LayerRow(_Frozen):
    """Layers that stand for each other."""

    layers: tuple[int | None, ...]
    """For each candidate the index of its layer; None for a gap."""
    differs: bool


class Ratio(_Frozen):
    """A figure / the first candidate's, with the 95 % interval that both figures' intervals make."""

    value: float
    low: float
    high: float

    @property
    def apart(self) -> bool:
        """Whether the two can be told apart."""
        return not self.low <= 1 <= self.high


class FigureRow(_Frozen):
    """One figure at one place."""

    place: Place
    metric: str
    unit: str
    direction: str
    figures: tuple[Figure | None, ...]
    """None: the candidate was not measured there."""
    ratios: tuple[Ratio | None, ...]
    """None for the first, where a figure is missing, and where one has no interval to tell by."""


class EvaluationRow(_Frozen):
    """One evaluation group at one rung."""

    rung: str
    group: str
    """'' for the quality, the mean over groups."""
    values: tuple[float | None, ...]
    differences: tuple[float | None, ...]
    """To the first candidate's."""


class ComparisonView(_Frozen):
    """Several candidates; the first is what the others are compared with."""

    study: str
    candidates: tuple[CandidateView, ...]
    rows: tuple[LayerRow, ...]
    figures: tuple[FigureRow, ...]
    evaluations: tuple[EvaluationRow, ...]


def comparison_view(store: Store, name: str, numbers: Sequence[int]) -> ComparisonView:
    """The comparison of some trials, in the order asked for.

    Raises:
        InvalidInput: too few, too many, or one twice.
        UnknownName: no such study, or no such trial.
    """
    if not FEWEST <= len(numbers) <= MOST or len(set(numbers)) < len(numbers):
        raise InvalidInput(f"name {FEWEST} to {MOST} different trials to compare, not {list(numbers)}", where="trial")
    candidates = candidate_views(store, name, numbers)
    layouts = [Layout.parse(each.layout.text) for each in candidates]
    rows = [LayerRow(layers=row, differs=differs(layouts, row)) for row in align(layouts)]
    return ComparisonView(
        study=name,
        candidates=tuple(candidates),
        rows=tuple(rows),
        figures=tuple(_figures(candidates)),
        evaluations=tuple(_evaluations(candidates)),
    )


def _figures(candidates: Sequence[CandidateView]) -> Iterator[FigureRow]:
    by_place = [{each.place: each for each in candidate.places} for candidate in candidates]
    for place in dict.fromkeys(place for places in by_place for place in sorted(places)):
        taken = [places.get(place) for places in by_place]
        for metric in _METRICS:
            figures = tuple(_figure(each, metric) for each in taken)
            if any(figure and figure.value is not None for figure in figures):
                yield FigureRow(
                    place=place,
                    metric=metric,
                    unit=METRICS[metric].unit,
                    direction=METRICS[metric].direction,
                    figures=figures,
                    ratios=(None, *(_ratio(figure, figures[0]) for figure in figures[1:])),
                )


def _figure(taken: PlaceView | None, metric: str) -> Figure | None:
    return taken.figures.get(metric) if taken else None


def _ratio(figure: Figure | None, base: Figure | None) -> Ratio | None:
    if figure is None or base is None or not figure.value or not base.value:
        return None
    sd = math.hypot(log_sd(figure), log_sd(base))
    if not sd:
        return None
    mean = math.log(figure.value / base.value)
    off = _NORMAL_95 * sd
    return Ratio(value=math.exp(mean), low=math.exp(mean - off), high=math.exp(mean + off))


def _evaluations(candidates: Sequence[CandidateView]) -> Iterator[EvaluationRow]:
    scores = [{(each.rung, each.group): each.value for each in candidate.evaluations} for candidate in candidates]
    for rung, group in dict.fromkeys(key for known in scores for key in known):
        values = [known.get((rung, group)) for known in scores]
        first = values[0]
        yield EvaluationRow(
            rung=rung,
            group=group,
            values=tuple(values),
            differences=tuple(None if value is None or first is None else value - first for value in values),
        )
