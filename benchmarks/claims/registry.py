"""Which statistics pages, commands and JSON show, and which rows of the table say how true they are.

Fields of views and records whose names end like those of a statistic are found by `statistics`; each has to be listed
in `COVERAGE`, with the statistics of rows that it is covered by, or with the reason why it states nothing that could be
false. `tests/unit/test_benchmark_claims.py` fails where one is missing.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re
from collections.abc import Iterator, Mapping
from types import ModuleType

from pydantic import BaseModel

SUFFIX = re.compile(
    r"(^|_)(low|high|sd|chances?|intervals?|confidence|reliability|noise|p_front|ci95|estimate|overall|top_third|"
    r"spearman|kendall|inside|likelihood|probability)$"
)
"""Of names of statistics."""
PACKAGES = ("nas.serve.views", "nas.search.analysis", "nas.measure.protocol", "nas.train.adapt", "nas.train.compare")
MODULES = ("nas.core.family", "nas.core.measurement", "nas.core.scoring", "nas.search.study.estimate")


@dataclasses.dataclass(frozen=True)
class Nothing:
    """Why a field states nothing that could be false."""

    reason: str


FIGURE = (
    "figure: memory, energy, loading",
    "figure: ttft",
    "figure: decode_p50",
    "figure: decode_p95",
    "figure: latency",
)
QUALITY = ("quality: interval of the value", "quality: deviation over seeds / true", "recall: interval of the value")
_OF_AXES = (*FIGURE, *QUALITY)
_FORECAST = ("hardware model: interval of a forecast",)
_HEADLINE = ("headline: all stated intervals hold", "headline: stated gain - true gain")
_P_FRONT = ("front: share of draws on it (P(front))",)
_VOLUME = ("hypervolume: interval",)
_SPAN = Nothing("a range of durations, which is called rough and no interval")
_OPTION = Nothing("what a user asks for")
_PARTS = Nothing("holds other models, whose fields are listed")

COVERAGE: Mapping[str, tuple[str, ...] | Nothing] = {
    "nas.core.family.RecordedFigure.ci95": FIGURE,
    "nas.core.family.TaskScore.ci95": ("exact answers of a task",),
    "nas.core.measurement.Figure.high": FIGURE,
    "nas.core.measurement.Figure.log_sd": FIGURE,
    "nas.core.measurement.Figure.low": FIGURE,
    "nas.core.measurement.Figure.shared_log_sd": ("budget: interval of the value",),
    "nas.core.measurement.ReferenceTimes.log_sd": FIGURE,
    "nas.core.scoring.Axis.sd": _OF_AXES,
    "nas.core.scoring.Axis.value_sd": ("budget: interval of the value", "quality: interval of the value"),
    "nas.core.scoring.BudgetCheck.chance": (
        "budget: chance that it is kept",
        "quality: chance that a budget is kept",
    ),
    "nas.core.scoring.BudgetCheck.high": ("budget: interval of the value", "quality: interval of the value"),
    "nas.core.scoring.BudgetCheck.log_sd": ("budget: interval of the value", "quality: interval of the value"),
    "nas.core.scoring.BudgetCheck.low": ("budget: interval of the value", "quality: interval of the value"),
    "nas.core.scoring.QualityValue.recall_sd": ("recall: interval of the value",),
    "nas.core.scoring.QualityValue.sd": QUALITY,
    "nas.measure.protocol.file_choice.Check.chance": ("budget: chance that it is kept",),
    "nas.search.analysis.archive._LoggedFigure.high": FIGURE,
    "nas.search.analysis.archive._LoggedFigure.low": FIGURE,
    "nas.search.analysis.agreement.Coefficient.high": (
        "agreement: interval of Spearman's rho",
        "agreement: interval of Kendall's tau",
    ),
    "nas.search.analysis.agreement.Coefficient.low": (
        "agreement: interval of Spearman's rho",
        "agreement: interval of Kendall's tau",
    ),
    "nas.search.analysis.agreement.RankCorrelation.kendall": ("agreement: interval of Kendall's tau",),
    "nas.search.analysis.agreement.RankCorrelation.spearman": ("agreement: interval of Spearman's rho",),
    "nas.search.analysis.effects.Effects.high": (
        "knobs: interval of the effect",
        "knobs: one without effect is marked",
    ),
    "nas.search.analysis.effects.Effects.low": ("knobs: interval of the effect", "knobs: one without effect is marked"),
    "nas.search.analysis.hardware.Forecast.high": _FORECAST,
    "nas.search.analysis.hardware.Forecast.low": _FORECAST,
    "nas.measure.protocol.estimator.NoiseModel.run_sd": Nothing("a constant of the protocol"),
    "nas.search.analysis.hardware.ModelError.inside": Nothing("counts, over the layouts of the study itself"),
    "nas.search.analysis.headline.Headline.confidence": (*_HEADLINE, "headline: a layout is better"),
    "nas.search.analysis.headline.StatedGain.high": _HEADLINE,
    "nas.search.analysis.headline.StatedGain.low": _HEADLINE,
    "nas.search.analysis.history.VolumeView.estimate": _VOLUME,
    "nas.search.analysis.history.VolumeView.high": _VOLUME,
    "nas.search.analysis.history.VolumeView.low": _VOLUME,
    "nas.search.analysis.reliability.QualityReliability.front_noise": (
        "front: share of members by noise, stated - true",
    ),
    "nas.search.analysis.reliability.QualityReliability.overall": (
        "reliability, stated - true",
        "headline: quality is said to order the layouts",
    ),
    "nas.search.analysis.reliability.QualityReliability.seen_sd": ("quality: deviation over seeds / true",),
    "nas.search.analysis.reliability.QualityReliability.stated_sd": ("quality: deviation over seeds / true",),
    "nas.search.analysis.reliability.QualityReliability.top_third": (
        "reliability of the top third, stated - true",
        "headline: quality is said to order the best third",
    ),
    "nas.search.analysis.report.NoiseSummary.interval": FIGURE,
    "nas.search.analysis.slices.Slice.sd": ("model of the search: interval of a forecast",),
    "nas.search.study.estimate.Span.high": _SPAN,
    "nas.search.study.estimate.Span.low": _SPAN,
    "nas.serve.views.base.Bounds.high": _OF_AXES,
    "nas.serve.views.base.Bounds.low": _OF_AXES,
    "nas.serve.views.base.Interval.high": _PARTS,
    "nas.serve.views.base.Interval.low": _PARTS,
    "nas.serve.views.base.Standing.p_front": _P_FRONT,
    "nas.serve.views.candidate.EvaluationView.sd": QUALITY,
    "nas.serve.views.candidate.ForecastView.high": _FORECAST,
    "nas.serve.views.candidate.ForecastView.low": _FORECAST,
    "nas.serve.views.candidate.FrontStanding.p_front": _P_FRONT,
    "nas.serve.views.candidate.NeighbourView.high": _OF_AXES,
    "nas.serve.views.candidate.NeighbourView.low": _OF_AXES,
    "nas.serve.views.candidate.ObjectiveView.high": _OF_AXES,
    "nas.serve.views.candidate.ObjectiveView.low": _OF_AXES,
    "nas.serve.views.candidate.ObjectiveView.sd": _OF_AXES,
    "nas.serve.views.candidate.Ratio.high": ("ratio of two figures",),
    "nas.serve.views.candidate.Ratio.low": ("ratio of two figures",),
    "nas.serve.views.study.FrontEntry.high": _OF_AXES,
    "nas.serve.views.study.FrontEntry.low": _OF_AXES,
    "nas.serve.views.study.FrontEntry.p_front": _P_FRONT,
    "nas.serve.views.study.RangeView.high": _OPTION,
    "nas.serve.views.study.RangeView.low": _OPTION,
    "nas.serve.views.study.ReferenceEntry.high": _OF_AXES,
    "nas.serve.views.study.ReferenceEntry.low": _OF_AXES,
    "nas.serve.views.study.StudyView.noise": _PARTS,
    "nas.serve.views.study.StudyView.reliability": _PARTS,
    "nas.serve.views.trials.TrialQuery.high": _OPTION,
    "nas.serve.views.trials.TrialQuery.low": _OPTION,
    "nas.serve.views.trials.TrialRow.high": _OF_AXES,
    "nas.serve.views.trials.TrialRow.low": _OF_AXES,
    "nas.serve.views.trials.TrialRow.p_front": _P_FRONT,
    "nas.train.adapt.adapt.Child.chances": ("budget: chance that it is kept",),
}

KEYS: Mapping[str, str] = {
    "hypervolume_ci95": "nas.search.analysis.history.VolumeView.estimate",
    "recall_sd": "nas.core.scoring.QualityValue.recall_sd",
}
"""Keys of JSON that are no field of a model here -> the field that has the same."""

BEFORE: list[dict[str, str]] = [
    {"statistic": name, "studies": where, "stated": stated, "held": held}
    for name, where, stated, held in (
        ("headline: a layout is better", "12 candidates, all equal to the reference", "5 %", "29 %, sure to 98.9 %"),
        ("headline: a layout is better", "60 candidates, all equal to the reference", "5 %", "58 %, sure to 98.9 %"),
        ("headline: a layout is better", "60 candidates, re-scored on fresh seeds", "5 %", "57 %, sure to 98.9 %"),
        ("quality: interval of the value", "1 or 2 rung seeds, or 4 fresh ones", "95 %", "81 to 83 %"),
        ("recall: interval of the value", "three quiet domains, a noisy one of recall", "95 %", "17 %"),
        ("budget: chance that it is kept", "relative limit", "85 %; 15 %", "76 %; 21 %"),
        ("budget on decode p95", "broken by 3 %, 3 repetitions", "5 %", "22 % refused for good"),
        (
            "reliability of the top third",
            "signal 0.08, noise 0.05 / 0.04 / 0.03",
            "0.10 / 0.25 / 0.48",
            "0.41 / 0.52 / 0.65",
        ),
        ("front: share of members by noise", "60 trials, noise 0.02", "35 %", "27 %"),
        ("knobs: interval of the effect", "15 to 60 trials, 8 to 20 knobs", "95 %", "18 to 64 %"),
        ("knobs: one without effect is marked", "the same", "5 %", "8 to 13 %"),
    )
]
"""What an independent simulation found of the version before, f02a369, in which none of this was checked."""


def statistics() -> Iterator[str]:
    """Yields the fields of models and records that are shown and whose names are those of statistics."""
    for module in _modules():
        for kind in vars(module).values():
            if isinstance(kind, type) and kind.__module__ == module.__name__:
                yield from (
                    f"{module.__name__}.{kind.__name__}.{name}" for name in _fields(kind) if SUFFIX.search(name)
                )


def _modules() -> Iterator[ModuleType]:
    for name in PACKAGES:
        package = importlib.import_module(name)
        yield from (
            importlib.import_module(f"{name}.{module.name}") for module in pkgutil.iter_modules(package.__path__)
        )
    yield from map(importlib.import_module, MODULES)


def _fields(kind: type) -> list[str]:
    if issubclass(kind, BaseModel):
        return list(kind.model_fields)
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return list(getattr(kind, "_fields", ()))
