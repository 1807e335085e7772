"""A comparison as tables: one like the report's Tables 2 and 3, and the ratios beside the report's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from nas.core.family import ComparedModel, Comparison, Figure, Metric
from nas.core.units import show_count
from nas.family.ratios import figure_of
from nas.family.report_tables import COLUMNS, HX370, REPORT, S25

Row = list[str]

_TITLES: dict[Metric, str] = {
    "prefill_tps": "prefill tok/s", "decode_tps": "decode tok/s", "ttft_ms": "TTFT ms", "peak_rss_mb": "peak MB",
}  # fmt: skip


def figures_table(comparison: Comparison) -> tuple[Row, list[Row]]:
    """Columns and rows: a row per model, members first, then as they were asked for."""
    asked = _asked(comparison.models)
    columns = ["model", "parameters", *(f"{_TITLES[metric]} {_at(prompt)}" for metric, prompt in asked)]
    rows = [
        [_name(model), show_count(model.parameters), *(_shown(figure_of(model, *each)) for each in asked)]
        for model in comparison.models
    ]
    return columns, rows


def ratios_table(comparison: Comparison) -> tuple[Row, list[Row]]:
    """Columns and rows: a row per pair; each cell holds the ratio here, then the report's on its two devices."""
    columns = ["faster", "than", *(f"{_TITLES[metric].split()[0]} {_at(prompt)}" for metric, prompt in COLUMNS)]
    rows = []
    for (model, other), pair in groupby(comparison.ratios, key=lambda ratio: (ratio.model, ratio.other)):
        cells = [" / ".join(map(_ratio, (ratio.here, *(ratio.report.get(one) for one in REPORT)))) for ratio in pair]
        rows.append([model, other, *cells])
    return columns, rows


def reasons(comparison: Comparison) -> Iterator[str]:
    """Why figures are missing, a line per model and reason."""
    for model in comparison.models:
        for reason in dict.fromkeys(each.reason for each in model.measured.figures if each.value is None):
            where = ", ".join(
                f"{_TITLES[each.metric]} {_at(each.prompt)}" for each in model.measured.figures if each.reason == reason
            )
            yield f"{model.name}: {where}: {reason}"


def as_markdown(comparison: Comparison) -> str:
    """Conditions, both tables and what explains them, for a page."""
    parts = [
        f"{comparison.made}, device `{comparison.device}`:",
        "\n".join(f"- {name}: {value}" for name, value in comparison.conditions.items()),
        _markdown(*figures_table(comparison)),
    ]
    if comparison.ratios:
        parts += [
            f"Ratios: here / {S25} / {HX370} (the last two from the report; - where it does not tell).",
            _markdown(*ratios_table(comparison)),
        ]
    parts += ["\n".join(f"- {line}" for line in lines) for lines in ([*reasons(comparison)], comparison.notes) if lines]
    return "\n\n".join(parts)


def _markdown(columns: Row, rows: Sequence[Row]) -> str:
    lines = [columns, ["---", *("---:" for _ in columns[1:])], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _asked(models: Sequence[ComparedModel]) -> list[tuple[Metric, int]]:
    """What was asked of the models, by metric and then by context."""
    found = {(each.metric, each.prompt) for model in models for each in model.measured.figures}
    return sorted(found, key=lambda each: (list(_TITLES).index(each[0]), each[1]))


def _name(model: ComparedModel) -> str:
    marks = [mark for mark, holds in (("member", model.member), ("noisy", model.measured.noisy)) if holds]
    return f"{model.name} ({', '.join(marks)})" if marks else model.name


def _at(prompt: int) -> str:
    return f"{prompt // 1024}K" if prompt % 1024 == 0 else str(prompt)


def _shown(figure: Figure | None) -> str:
    if figure is None or figure.value is None:
        return "-"
    return f"{figure.value:.4g}" if figure.value < 1e3 else f"{figure.value:,.0f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
