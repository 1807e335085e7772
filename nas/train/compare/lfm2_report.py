"""Data of the LFM2 report's comparison: size classes, Tables 2 and 3; and ratios of models in its form.

Section 2.4 of arXiv:2511.23404. All models ran in llama.cpp as Q4_0 files at batch size 1. Prefill is of a prompt of 1K
or 4K tokens; decode is of 100 tokens after such a prompt. The report gives neither threads nor llama.cpp's version and
settings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import TypeAdapter

from nas.core.errors import UnknownName
from nas.core.family import ComparedModel, Ratio, RecordedFigure
from nas.core.published import LFM2

_CLASS_LIMITS = {"350M": 5e8, "700M": 9e8, "1B": 2e9, "3B": math.inf}
"""Class -> upper limit of its models' parameters."""

SIZE_CLASSES = tuple(_CLASS_LIMITS)
"""Groups of models that the report compares with each other."""

S25 = "Galaxy S25"
"""Samsung Galaxy S25, Snapdragon 8 Elite (Table 2)."""
HX370 = "HX 370"
"""AMD Ryzen AI 9 HX 370 (Table 3)."""

COLUMNS: tuple[tuple[str, int], ...] = (
    ("prefill_tps", 1024),
    ("prefill_tps", 4096),
    ("decode_tps", 1024),
    ("decode_tps", 4096),
)

REPORT = TypeAdapter(dict[str, dict[str, tuple[float, ...]]]).validate_json(
    Path(__file__).with_name("lfm2_report.json").read_bytes()
)
"""Device -> model -> its figures in tokens per second, in the order of `COLUMNS`."""


def size_class(parameters: int) -> str:
    """Returns the class of a model; mixtures of experts count with all parameters, as in the report."""
    return next(name for name, limit in _CLASS_LIMITS.items() if parameters < limit)


def known_class(name: str) -> str:
    """Returns `name` if it is a size class.

    Raises:
        UnknownName: it is none.
    """
    if name not in _CLASS_LIMITS:
        raise UnknownName("size class", name, _CLASS_LIMITS, where="--class")
    return name


def report_ratios(model: str, other: str, metric: str, prompt: int) -> dict[str, float]:
    """Returns device -> speed of `model` / speed of `other`, for the report's devices that ran both."""
    if (metric, prompt) not in COLUMNS:
        return {}
    column = COLUMNS.index((metric, prompt))
    return {
        device: rows[model][column] / rows[other][column]
        for device, rows in REPORT.items()
        if model in rows and other in rows
    }


def ratios(models: Sequence[ComparedModel]) -> Iterator[Ratio]:
    """Yields ratios within size classes, as the report does: members and LFM2 / others, and members / LFM2."""
    for model in models:
        for other in models:
            if _rank(model) > _rank(other) and size_class(model.parameters) == size_class(other.parameters):
                for metric, prompt in COLUMNS:
                    yield Ratio(
                        model=model.name,
                        other=other.name,
                        metric=metric,
                        prompt=prompt,
                        here=_quotient(figure_of(model, metric, prompt), figure_of(other, metric, prompt)),
                        report=report_ratios(model.name, other.name, metric, prompt),
                    )


def figure_of(model: ComparedModel, metric: str, prompt: int) -> RecordedFigure | None:
    """Returns a figure of `model`, which may lack a value; None: it was not requested."""
    figures = model.measured.figures
    return next((figure for figure in figures if (figure.metric, figure.prompt) == (metric, prompt)), None)


def _rank(model: ComparedModel) -> int:
    """Returns the rank of a model: the numerator of a ratio has the higher one."""
    return 2 if model.member else int(model.name in LFM2)


def _quotient(figure: RecordedFigure | None, other: RecordedFigure | None) -> float | None:
    if figure is None or other is None or figure.value is None or other.value is None:
        return None
    return figure.value / other.value
