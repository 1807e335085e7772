"""Data of the LFM2 report's comparison: size classes, Tables 2 and 3; and ratios of models in its form.

Section 2.4 of arXiv:2511.23404. All models ran in llama.cpp as Q4_0 files at batch size 1. Prefill is of a prompt of 1K
or 4K tokens; decode is of 100 tokens after such a prompt. The report gives neither threads nor llama.cpp's version and
settings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

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

_S25 = """
    LFM2-350M           1067 657 194.1 143.8
    Granite-4.0-350M     528 210 132.9  70.7
    Granite-4.0-H-350M   784 594 150.7 119.3
    LFM2-700M            522 341 104.2  80.2
    Qwen3-0.6B           318 136  76.7  41.8
    LFM2-1.2B            335 222  69.8  55.5
    Llama-3.2-1B         229 130  54.6  37.8
    Qwen3-1.7B           140  98  39.7  26.9
    Gemma-3-1B           377 295  67.5  67.1
    Granite-4.0-1B       147  79  41.3  25.0
    Granite-4.0-H-1B     186 159  46.1  44.1
    LFM2-2.6B            143 116  33.8  30.0
    LFM2-8B-A1B           85  76  48.6  41.9
    Llama-3.2-3B          79  51  24.2  15.8
    Qwen3-4B              57  35  17.2  11.4
    Gemma-3-4B            72  63  18.3  17.9
    SmolLM3-3B            98  66  26.1  19.2
    Granite-4.0-Micro     65  38  20.2  12.1
    Granite-4.0-H-Micro   83  77  24.9  23.5
    Granite-4.0-H-Tiny    86  86  39.2  37.4
"""

_HX370 = """
    LFM2-350M           7534 5540 207.7 170.5
    Granite-4.0-350M    5499 2938 225.0 166.2
    Granite-4.0-H-350M  4568 4250 134.7 123.2
    LFM2-700M           4214 3311 134.6 118.4
    Qwen3-0.6B          3594 2204 116.0  53.4
    LFM2-1.2B           2784 2302  99.7  89.0
    Llama-3.2-1B        2912 1890  97.3  73.5
    Qwen3-1.7B          2019 1491  60.8  38.5
    Gemma-3-1B          3972 3809 103.6  99.3
    Granite-4.0-1B      1823 1256  64.5  43.6
    Granite-4.0-H-1B    1565 1523  59.6  57.1
    LFM2-2.6B           1335 1171  50.3  46.8
    LFM2-8B-A1B         1320 1185  74.9  69.1
    Llama-3.2-3B        1179  916  38.3  28.2
    Qwen3-4B             861  628  31.0  22.2
    Gemma-3-4B          1119 1054  33.0  31.6
    SmolLM3-3B          1248  982  42.4  33.4
    Granite-4.0-Micro    929  608  36.7  28.9
    Granite-4.0-H-Micro  932  896  34.7  33.8
    Granite-4.0-H-Tiny  1050 1046  55.0  52.1
"""


def _read(table: str) -> dict[str, tuple[float, ...]]:
    rows = (line.split() for line in table.strip().splitlines())
    return {name: tuple(map(float, values)) for name, *values in rows}


REPORT: dict[str, dict[str, tuple[float, ...]]] = {S25: _read(_S25), HX370: _read(_HX370)}
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
                        model=model.name, other=other.name, metric=metric, prompt=prompt,
                        here=_quotient(figure_of(model, metric, prompt), figure_of(other, metric, prompt)),
                        report=report_ratios(model.name, other.name, metric, prompt),
                    )  # fmt: skip


def figure_of(model: ComparedModel, metric: str, prompt: int) -> RecordedFigure | None:
    """Returns a figure of `model`, which may lack a value; None: it was not requested."""
    return next((each for each in model.measured.figures if (each.metric, each.prompt) == (metric, prompt)), None)


def _rank(model: ComparedModel) -> int:
    """Returns the rank of a model: the numerator of a ratio has the higher one."""
    return 2 if model.member else int(model.name in LFM2)


def _quotient(figure: RecordedFigure | None, other: RecordedFigure | None) -> float | None:
    if figure is None or other is None or figure.value is None or other.value is None:
        return None
    return figure.value / other.value
