"""Who is how many times faster than whom, here and in the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nas.core.family import ComparedModel, Figure, Metric, Ratio
from nas.core.published import LFM2
from nas.family.report_tables import COLUMNS, report_ratios
from nas.family.size_classes import size_class


def figure_of(model: ComparedModel, metric: Metric, prompt: int) -> Figure | None:
    """The figure that was asked of `model`, measured or not."""
    return next((each for each in model.measured.figures if (each.metric, each.prompt) == (metric, prompt)), None)


def ratios(models: Sequence[ComparedModel]) -> Iterator[Ratio]:
    """Members and LFM2 over the others of their size class, as the report compares; members over LFM2, too."""
    for model, other in _pairs(models):
        for metric, prompt in COLUMNS:
            yield Ratio(
                model=model.name, other=other.name, metric=metric, prompt=prompt,
                here=_quotient(figure_of(model, metric, prompt), figure_of(other, metric, prompt)),
                report=report_ratios(model.name, other.name, metric, prompt),
            )  # fmt: skip


def _pairs(models: Sequence[ComparedModel]) -> Iterator[tuple[ComparedModel, ComparedModel]]:
    for model in models:
        for other in models:
            if _rank(model) > _rank(other) and size_class(model.parameters) == size_class(other.parameters):
                yield model, other


def _rank(model: ComparedModel) -> int:
    """A pair is told from the side that ranks higher: a member, then LFM2, then the rest."""
    return 2 if model.member else int(model.name in LFM2)


def _quotient(figure: Figure | None, other: Figure | None) -> float | None:
    if figure is None or other is None or figure.value is None or other.value is None:
        return None
    return figure.value / other.value
