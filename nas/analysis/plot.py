"""The front as a picture: one panel for each pair of objectives, as PNG and SVG."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Report = Mapping[str, Any]
Objective = Mapping[str, Any]

# Okabe and Ito's palette, which people with colour-vision deficiencies can tell apart.
_OTHER, _FRONT, _BUDGET = "#999999", "#0072B2", "#D55E00"
_REFERENCES = ("#E69F00", "#CC79A7", "#009E73")
_PANEL_IN = (4.6, 4.2)
_DPI = 160


def draw_front(report: Report, folder: Path) -> tuple[Path, Path]:
    """Draws a study's complete trials, its front, references and budgets.

    Args:
        report: of `nas.analysis.report.study_report`.
        folder: gets `front.png` and `front.svg`, each whole or not at all.

    Returns:
        The two paths.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [_axes_of(pair) for pair in itertools.combinations(report["objectives"], 2)]
    figure = Figure(figsize=(_PANEL_IN[0] * len(pairs), _PANEL_IN[1] + 0.6), layout="constrained")
    panels = figure.subplots(1, len(pairs), squeeze=False)[0]
    for panel, (x, y) in zip(panels, pairs, strict=True):
        _draw_panel(panel, report, x, y)
    figure.suptitle(_title(report), fontsize=11)
    _draw_legend(figure, panels)
    png, svg = folder / "front.png", folder / "front.svg"
    with matplotlib.rc_context({"svg.hashsalt": "hilnas", "svg.fonttype": "none"}):
        for path in (png, svg):
            _save(figure, path)
    return png, svg


def _axes_of(pair: tuple[Objective, Objective]) -> tuple[Objective, Objective]:
    """Returns (x, y): an objective to maximise is vertical."""
    first, second = pair
    return (second, first) if first["direction"] == "max" else (first, second)


def _draw_panel(panel: Axes, report: Report, x: Objective, y: Objective) -> None:
    on_front = {row["trial"] for row in report["front"]}
    others = _points((row for row in report["ranking"] if row["trial"] not in on_front), x, y)
    front = _points(report["front"], x, y)
    if others:
        panel.scatter(*_unzipped(others), s=24, color=_OTHER, alpha=0.7, linewidths=0, label="complete")
    if noisy := _points(report["noisy"], x, y):
        panel.scatter(*_unzipped(noisy), s=24, facecolors="none", edgecolors=_OTHER, label="noisy")
    if front:
        panel.scatter(*_unzipped(front), s=48, color=_FRONT, zorder=3, label="front")
        for row, at in zip(report["front"], front, strict=True):
            panel.annotate(f"{row['trial']}", at, xytext=(4, 4), textcoords="offset points", fontsize=8, color=_FRONT)
    for row, colour in zip(report["references"], itertools.cycle(_REFERENCES), strict=False):
        for at in _points([row], x, y):
            panel.scatter(*at, s=150, marker="*", color=colour, zorder=4, label=f"{row['name']} reference")
    _draw_budgets(panel, report["budgets"], x, y)
    panel.set_xlabel(_label(x))
    panel.set_ylabel(_label(y))
    panel.grid(alpha=0.25)
    panel.margins(0.12)


def _points(rows: Any, x: Objective, y: Objective) -> list[tuple[float, float]]:
    """Returns the coordinates of the rows that have both."""
    values = [(row["objectives"].get(x["name"]), row["objectives"].get(y["name"])) for row in rows]
    return [(a, b) for a, b in values if a is not None and b is not None]


def _unzipped(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _draw_legend(figure: Figure, panels: Iterable[Axes]) -> None:
    """Draws one legend for all panels, each kind of mark once."""
    marks = {
        label: handle
        for panel in panels
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }  # fmt: skip
    if marks:
        figure.legend(
            marks.values(), marks.keys(), loc="outside lower center", ncols=len(marks), frameon=False, fontsize=9
        )


def _draw_budgets(panel: Axes, budgets: Sequence[Mapping[str, Any]], x: Objective, y: Objective) -> None:
    """Draws lines at the limits of budgets on an axis of this panel."""
    for budget in budgets:
        for axis, line in ((x, panel.axvline), (y, panel.axhline)):
            # An axis over several devices or runtimes is a ratio; limits are figures of one of them.
            one_place = axis["aggregate"] is None
            same = budget["metric"] == axis["metric"] and budget["workload"] == axis["workload"]
            if one_place and same and budget["limit"] is not None:
                line(budget["limit"], color=_BUDGET, linestyle="--", linewidth=1, label="budget")


def _label(objective: Objective) -> str:
    unit = f" [{objective['unit']}]" if objective["unit"] else ""
    at = f" at {objective['workload']}" if objective["workload"] else ""
    return f"{objective['name']}{at}{unit}, {'more' if objective['direction'] == 'max' else 'less'} is better"


def _title(report: Report) -> str:
    volume = report["hypervolume"]
    suffix = "" if volume is None else f", hypervolume {volume:.4g}"
    return f"{report['study']}: {len(report['front'])} of {len(report['ranking'])} complete on the front{suffix}"


def _save(figure: Figure, path: Path) -> None:
    partial = path.with_name(f".{path.name}.partial")
    # No date in the file: equal results give equal bytes.
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(partial, format=path.suffix[1:], dpi=_DPI, metadata=metadata)
    partial.replace(path)
