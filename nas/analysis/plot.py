"""The front as a picture: one panel for each pair of objectives, as PNG and SVG."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nas.core.scoring import PUBLISHED

Report = Mapping[str, Any]
Objective = Mapping[str, Any]

# Okabe and Ito's palette, which people with colour-vision deficiencies can tell apart.
_OTHER, _FRONT, _BUDGET = "#999999", "#0072B2", "#D55E00"
_REFERENCES = ("#E69F00", "#CC79A7", "#009E73")
_ARROWS = {(0, 1): "\u2191", (0, -1): "\u2193", (1, 0): "\u2192", (-1, 0): "\u2190"}
_PANEL_IN = (4.6, 4.2)
_MARGIN = 0.12
_DPI = 160


def draw_front(report: Report, folder: Path) -> tuple[Path, Path]:
    """Draws a study's complete trials, its front, references and budgets.

    Axes reach over the front and the published reference, and to what is no further away than these are from each
    other. A reference beyond that is an arrow at the edge; complete trials beyond it are counted.

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
    _draw_budgets(panel, report["budgets"], x, y)
    published = _points((row for row in report["references"] if row["name"] == PUBLISHED), x, y)
    further = [at for row in report["references"] for at in _points([row], x, y)]
    for axis, name in enumerate("xy"):
        ends = _ends([at[axis] for at in (*front, *published)], [at[axis] for at in (*others, *further)])
        panel.set(**{f"{name}lim": ends} if ends else {})
    if outside := sum(_directions(panel, at) != (0, 0) for at in others):
        panel.text(0.98, 0.02, f"{outside} complete outside", transform=panel.transAxes, ha="right", fontsize=8)
    for row, colour in zip(report["references"], itertools.cycle(_REFERENCES), strict=False):
        for at in _points([row], x, y):
            _draw_reference(panel, row["name"], at, colour)
    panel.set_xlabel(_label(x))
    panel.set_ylabel(_label(y))
    panel.grid(alpha=0.25)
    panel.margins(_MARGIN)


def _ends(near: Sequence[float], others: Sequence[float]) -> tuple[float, float] | None:
    """Returns the ends of an axis over `near`, and over those of `others` that are no further away than its width.

    Over all if `near` has no width; None: there are no values, or they are all equal.
    """
    width = max(near, default=0.0) - min(near, default=0.0)
    shown = [*near, *(each for each in others if not width or min(near) - width <= each <= max(near) + width)]
    room = _MARGIN * (max(shown, default=0.0) - min(shown, default=0.0))
    return (min(shown) - room, max(shown) + room) if room else None


def _directions(panel: Axes, at: tuple[float, float]) -> tuple[int, int]:
    """Returns on which sides of a panel a point is: 0, or -1 and 1 below and beyond the ends of x and of y."""
    (left, right), (bottom, top) = panel.get_xlim(), panel.get_ylim()
    return int(at[0] > right) - int(at[0] < left), int(at[1] > top) - int(at[1] < bottom)


def _draw_reference(panel: Axes, name: str, at: tuple[float, float], colour: str) -> None:
    """Draws a star, or an arrow head at the edge of the panel with the figures that are outside of it."""
    across, up = _directions(panel, at)
    label = f"{name} reference"
    if not (across or up):
        panel.scatter(*at, s=150, marker="*", color=colour, zorder=4, label=label)
        return
    limits = (panel.get_xlim(), panel.get_ylim())
    inset = [0.04 * (high - low) for low, high in limits]
    place_x, place_y = (
        min(max(value, low + room), high - room) for value, (low, high), room in zip(at, limits, inset, strict=True)
    )
    angle = round(math.degrees(math.atan2(up, across))) - 90
    panel.scatter(place_x, place_y, s=90, marker=(3, 0, angle), color=colour, zorder=4, label=label)
    sides = ((across, 0), at[0]), ((0, up), at[1])
    figures = [f"{_ARROWS[side]} {value:.4g}" for side, value in sides if side in _ARROWS]
    right, high = place_x > sum(limits[0]) / 2, place_y > sum(limits[1]) / 2
    panel.annotate(
        f"{name} {' '.join(figures)}", (place_x, place_y), xytext=(-8 if right else 8, -16 if high else 10),
        textcoords="offset points", ha="right" if right else "left", fontsize=8, color=colour,
    )  # fmt: skip


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
