"""The pictures of a candidate's page and of a comparison, from their view-models."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from nas.core.scoring import BudgetCheck, Place
from nas.dashboard.pictures.curves import Curve, training_curves
from nas.dashboard.pictures.distribution import cumulative, histogram
from nas.dashboard.pictures.plot import Limit
from nas.dashboard.pictures.strip import layout_strip, tallest
from nas.dashboard.pictures.trace import Stretch, latency_trace
from nas.service.candidate_models import CandidateView, PlaceView, RepetitionView
from nas.service.comparison import ComparisonView

_PER_TOKEN = ("decode_p50", "decode_p95", "decode_mean")


def strip(view: CandidateView) -> Markup:
    """The candidate's layout."""
    return layout_strip(view.layout.layers, f"{view.name}: {view.layout.text}")


def curves(view: CandidateView) -> Markup:
    """All trainings of its proxy."""
    drawn = [Curve(each.name, _seed(each.seed), each.curve) for each in view.trainings]
    return training_curves(drawn, f"training of {view.name}")


def trace(view: CandidateView, place: PlaceView) -> Markup:
    """Every token of a measurement, as it was read."""
    stretches = [
        Stretch(_repetition(number, each), each.token_ms, each.temperature_c, each.valid)
        for number, each in enumerate(place.repetitions, 1)
    ]
    return latency_trace(stretches, place.name, token_limits(view.budgets, place.place))


def token_histogram(view: CandidateView, place: PlaceView) -> Markup:
    """The tokens that count, corrected for drift."""
    return histogram(corrected_ms(place), place.name, "ms per token", token_limits(view.budgets, place.place))


def no_temperature(place: PlaceView) -> str | None:
    """Why the trace has no temperature; None where it has one."""
    if any(each.temperature_c is not None for each in place.repetitions):
        return None
    return next((each.temperature_unread for each in place.repetitions if each.temperature_unread), "not read")


def corrected_ms(place: PlaceView) -> list[float]:
    """Milliseconds per token of the repetitions that count, times candidate / reference x calibration."""
    counted = [each for each in place.repetitions if each.valid or place.noisy]
    return [ms / (1 + (each.drift or 0.0)) for each in counted for ms in each.token_ms]


def token_limits(budgets: Sequence[BudgetCheck], place: Place) -> list[Limit]:
    """The budgets that speak of tokens at a place."""
    return [
        Limit(each.name, each.limit, each.unit)
        for each in budgets
        if each.place == place and each.budget.split("@")[0] in _PER_TOKEN
    ]


def aligned_strips(view: ComparisonView) -> list[Markup]:
    """One strip a candidate, all on one scale, layers that stand for each other below each other."""
    most = max(tallest(each.layout.layers) for each in view.candidates)
    drawn = []
    for number, each in enumerate(view.candidates):
        indices = [row.layers[number] for row in view.rows]
        columns = [None if index is None else each.layout.layers[index] for index in indices]
        marked = [place for place, row in enumerate(view.rows) if row.differs]
        drawn.append(layout_strip(columns, f"{each.name}: {each.layout.text}", most=most, marked=marked))
    return drawn


def distributions(view: ComparisonView) -> list[tuple[str, Markup]]:
    """For each place the candidates' tokens as cumulative shares."""
    by_place = [{place.place: place for place in each.places} for each in view.candidates]
    names = {place.place: place.name for each in view.candidates for place in each.places}
    drawn = []
    for place, name in sorted(names.items()):
        samples = {
            each.name: corrected_ms(places[place]) if place in places else []
            for each, places in zip(view.candidates, by_place, strict=True)
        }
        limits = token_limits(view.candidates[0].budgets, place)
        drawn.append((name, cumulative(samples, name, "ms per token", limits)))
    return drawn


def _seed(seed: int | None) -> str:
    return "seed not known" if seed is None else f"seed {seed}"


def _repetition(number: int, taken: RepetitionView) -> str:
    name = f"repetition {number}"
    return name if taken.valid else f"{name}, refused: {taken.reason}"


def legend(*views: CandidateView) -> list[tuple[str, str]]:
    """(kind of block, what it is) of every kind in the layouts, in the order in which they first stand there."""
    blocks = (block for view in views for layer in view.layout.layers for block in layer.blocks)
    return list({block.kind: (block.kind, block.doc) for block in blocks}.values())
