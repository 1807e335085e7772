"""Shows a comparison: tables like Tables 2 and 3 of the LFM2 report, ratios next to its own, a plot like Figure 4."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from nas.core.durable import output_file, require_output
from nas.core.errors import InvalidInput
from nas.core.family import ComparedModel, Comparison, RecordedFigure
from nas.core.metrics import METRICS, recorded
from nas.core.published import LFM2
from nas.core.units import show_count
from nas.train.compare.lfm2_report import COLUMNS, REPORT, figure_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = list[str]

# Okabe and Ito's palette, which people with colour-vision deficiencies can tell apart.
_KINDS = {"member": ("#0072B2", "*", 150), "LFM2": ("#D55E00", "o", 50), "reference": ("#999999", "s", 36)}
_PANELS = (("prefill_tps", 4096), ("decode_tps", 4096))
_SUFFIXES = (".png", ".svg", ".pdf")
_DPI = 160
_SIZE = 7
"""Font size of the points' names, in points of 1/72 inch."""
_LINE = 9.0
"""Minimum distance of their lines, in points of 1/72 inch."""
_LETTER = 4.2
"""Width of a letter, in points of 1/72 inch."""


def figures_table(comparison: Comparison) -> tuple[Row, list[Row]]:
    """Returns columns and rows: a row per model, in the order of the comparison."""
    figures = _figures(comparison.models)
    columns = ["model", "parameters", *(_heading(metric, prompt) for metric, prompt in figures)]
    rows = [
        [_name(model), show_count(model.parameters), *(_figure_text(figure_of(model, *figure)) for figure in figures)]
        for model in comparison.models
    ]
    return columns, rows


def ratios_table(comparison: Comparison) -> tuple[Row, list[Row]]:
    """Returns columns and rows: a row per pair; a cell has the ratio here, then the report's on its two devices."""
    columns = ["faster", "than", *(f"{METRICS[metric].label} {_at(prompt)}" for metric, prompt in COLUMNS)]
    rows = []
    for (model, other), pair in groupby(comparison.ratios, key=lambda ratio: (ratio.model, ratio.other)):
        cells = [" / ".join(map(_ratio, (ratio.here, *map(ratio.report.get, REPORT)))) for ratio in pair]
        rows.append([model, other, *cells])
    return columns, rows


def reasons(comparison: Comparison) -> Iterator[str]:
    """Yields a line per model and reason of missing figures."""
    for model in comparison.models:
        for reason in dict.fromkeys(figure.reason for figure in model.measured.figures if figure.value is None):
            where = ", ".join(
                _heading(figure.metric, figure.prompt) for figure in model.measured.figures if figure.reason == reason
            )
            yield f"{model.name}: {where}: {reason}"


def _figures(models: Sequence[ComparedModel]) -> list[tuple[str, int]]:
    """Returns metric and context of the figures that any model has, in the order of columns."""
    columns = {(figure.metric, figure.prompt) for model in models for figure in model.measured.figures}
    order = [metric.name for metric in recorded()]
    return sorted(columns, key=lambda column: (order.index(column[0]), column[1]))


def _name(model: ComparedModel) -> str:
    return f"{model.name} (member)" if model.member else model.name


def _heading(metric: str, prompt: int) -> str:
    return f"{METRICS[metric].label} {METRICS[metric].unit} {_at(prompt)}"


def _at(prompt: int) -> str:
    return f"{prompt // 1024}K" if prompt % 1024 == 0 else str(prompt)


def _figure_text(figure: RecordedFigure | None) -> str:
    if figure is None or figure.value is None:
        return "-"
    return f"{figure.value:.4g}" if figure.value < 1e3 else f"{figure.value:,.0f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def draw_comparison(comparison: Comparison, path: Path) -> None:
    """Plots tokens per second against parameters; writes the file in the format of its suffix.

    Raises:
        InvalidInput: a suffix that is none of .png, .svg and .pdf.
    """
    import matplotlib
    from matplotlib.figure import Figure as Plot

    check_plot(path)
    figure = Plot(figsize=(11, 4.8), layout="constrained")
    for panel, (metric, prompt) in zip(figure.subplots(1, len(_PANELS)), _PANELS, strict=True):
        _draw_panel(panel, comparison, metric, prompt)
        panel.set_ylabel(f"{METRICS[metric].label} at {_at(prompt)} [{METRICS[metric].unit}]")
    figure.suptitle(f"{comparison.device}, {comparison.conditions.get('threads', '?')} thread(s), Q4_0", fontsize=11)
    with (
        output_file(path, flag="--plot") as scratch,
        matplotlib.rc_context({"svg.hashsalt": "hilnas", "svg.fonttype": "none"}),
    ):
        # No date in the file: equal results give equal bytes.
        metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix)
        figure.savefig(scratch, format=path.suffix[1:], dpi=_DPI, metadata=metadata)


def check_plot(path: Path) -> None:
    """Checks the file of a plot before what it shows is measured.

    Raises:
        InvalidInput: its suffix is none of .png, .svg and .pdf, or it cannot be written.
    """
    if path.suffix not in _SUFFIXES:
        raise InvalidInput(f"{path}: write {', '.join(_SUFFIXES)}", where="--plot")
    require_output(path, flag="--plot")


def _draw_panel(panel: Axes, comparison: Comparison, metric: str, prompt: int) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    panel.set_xscale("log")
    panel.set_yscale("log")
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())
    named: list[tuple[str, float, float]] = []
    for kind, (colour, marker, size) in _KINDS.items():
        points = [
            (model.name, model.parameters / 1e9, figure.value)
            for model in comparison.models
            if _kind(model) == kind and (figure := figure_of(model, metric, prompt)) and figure.value is not None
        ]
        if points:
            _, x, y = zip(*points, strict=True)
            panel.scatter(x, y, s=size, color=colour, marker=marker, label=kind, zorder=3)
        named += points
    panel.set_xlabel("parameters [billions]")
    panel.grid(alpha=0.25, which="both")
    panel.margins(x=0.32, y=0.15)  # room for the names on the right
    _write_names(panel, named)
    if panel.get_legend_handles_labels()[0]:
        panel.legend(loc="upper right", frameon=False, fontsize=9)  # speed falls with size: free


def _write_names(panel: Axes, points: list[tuple[str, float, float]]) -> None:
    """Writes a name to the right of each point; one that would overlap is lowered and gets a line to its point."""
    panel.autoscale_view()
    per_inch = panel.figure.dpi
    names: list[tuple[float, float, float]] = []  # left, right, height of names, in points of 1/72 inch
    for name, x, y in sorted(points, key=lambda point: -point[2]):
        start, height = (float(pixels) * 72 / per_inch for pixels in panel.transData.transform((x, y)))
        end, free = start + _LETTER * len(name), height
        while any(start < other[1] and other[0] < end and abs(free - other[2]) < _LINE for other in names):
            free -= 1
        names.append((start, end, free))
        panel.annotate(
            name,
            (x, y),
            xytext=(6, free - height - _SIZE / 3),
            textcoords="offset points",
            fontsize=_SIZE,
            arrowprops={"arrowstyle": "-", "lw": 0.4, "color": "#999999"} if free < height else None,
        )


def _kind(model: ComparedModel) -> str:
    return "member" if model.member else "LFM2" if model.name in LFM2 else "reference"
