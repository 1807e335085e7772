"""The front as a picture: one panel for each pair of objectives, as PNG and SVG."""

from __future__ import annotations

import io
import itertools
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from matplotlib.transforms import Bbox

from nas.core.durable import output_file
from nas.core.metrics import METRICS
from nas.core.scoring import PUBLISHED
from nas.core.stats import interval
from nas.core.units import show_number

Report = Mapping[str, Any]
Objective = Mapping[str, Any]

# The dashboard's colours on light ground (dashboard/assets/plots.css), of Okabe and Ito's palette, which people with
# colour-vision deficiencies can tell apart.
_FRONT = "#d55e00"
_BOUND = "#0072b2"
_OTHER = "#7f8c9b"
_BUDGET = "#b42318"
_INK = "#1b1f24"
_SOFT = "#59636e"
_LINE = "#d1d9e0"
_ARROWS = {(0, 1): "\u2191", (0, -1): "\u2193", (1, 0): "\u2192", (-1, 0): "\u2190"}
_CORNERS = {
    (True, True): "better \u2197",
    (True, False): "better \u2198",
    (False, True): "\u2196 better",
    (False, False): "\u2199 better",
}
_LARGE_IN = (6.4, 5.2)
"""Width and height of the large panel, in inches."""
_SMALL_IN = 3.6
"""Width of a small panel, in inches."""
_MARGIN = 0.1
"""Room at the ends of axes, as a share of their length."""
_BETTER = 1.8
"""How much more of it the better end has."""
_THOUSANDS = 10_000.0
"""From where on an axis counts in thousands: labels of more digits touch each other."""
_LEGEND = 5
"""Columns of the legend."""
_DPI = 160
_CHARACTERS_PER_IN = 12
"""Of the lines below the title."""
_NEAR = [(-6, 6), (6, 6), (6, -6), (-6, -6), (0, 9), (0, -9), (9, 0), (-9, 0)]
_AROUND = [*_NEAR, (-14, 14), (14, 14), (14, -14), (-14, -14), (0, 22), (0, -22)]
"""Offsets of a label from its point, in points, best first."""

_GROUND = {"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 0.5}
"""Of texts, which keeps lines below them apart."""

Point = tuple[float, float]


def draw_front(report: Report, folder: Path) -> tuple[Path, Path]:
    """Draws a study's complete trials, its front with 95 % intervals, references and budgets, and names the best trial.

    Below the title stands how far quality can be trusted. The first two objectives have a large panel, every other pair
    a small one. Axes reach over the front and the published reference, and to what is no further away than these are
    from each other. A reference beyond that is an arrow at the edge; complete trials beyond it are counted. Labels that
    would overlap are left out.

    Args:
        report: of `nas.search.analysis.report.study_report`.
        folder: gets `front.png` and `front.svg`, each whole or not at all.

    Returns:
        The two paths.
    """
    folder.mkdir(parents=True, exist_ok=True)
    figure, paths = _drawn(report), (folder / "front.png", folder / "front.svg")
    for path in paths:
        with output_file(path, flag="--picture") as scratch:
            _save(figure, scratch, path.suffix[1:])
    return paths


def front_svg(report: Report) -> str:
    """Returns the picture of `draw_front` as the text of an SVG file."""
    file = io.BytesIO()
    _save(_drawn(report), file, "svg")
    return file.getvalue().decode()


@matplotlib.rc_context({"text.parse_math": False})  # names of workloads and corpora may have two dollars
def _drawn(report: Report) -> Figure:
    # (x, y): an objective to maximise is vertical.
    pairs = [
        (second, first) if first["direction"] == "max" else (first, second)
        for first, second in itertools.combinations(report["objectives"], 2)
    ]
    figure, panels = _figure(len(pairs))
    for panel, (x, y) in zip(panels, pairs, strict=True):
        _draw_panel(panel, report, x, y)
    volume = "" if report["hypervolume"] is None else f", hypervolume {report['hypervolume']:.4g}"
    title = f"{report['study']}: {len(report['front'])} of {len(report['ranking'])} complete on the front{volume}"
    sure = textwrap.wrap((report["reliability"] or {}).get("text", ""), int(_CHARACTERS_PER_IN * figure.get_figwidth()))
    figure.suptitle("\n".join([title, *sure]), fontsize=10, color=_INK)
    _draw_legend(figure, panels)
    figure.draw_without_rendering()  # lays the panels out: labels need their sizes
    figure.set_layout_engine("none")
    for number, (panel, (x, y)) in enumerate(zip(panels, pairs, strict=True)):
        _label_points(panel, report, x, y, every=not number)
    return figure


def _figure(count: int) -> tuple[Figure, list[Axes]]:
    """Returns a figure with one large panel, and further ones in columns of two at its right."""
    columns = math.ceil((count - 1) / 2)
    figure = Figure(figsize=(_LARGE_IN[0] + columns * _SMALL_IN, _LARGE_IN[1]), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 1 + columns, width_ratios=[_LARGE_IN[0] / _SMALL_IN, *[1] * columns])
    panels = [figure.add_subplot(grid[:, 0])]
    for index in range(count - 1):
        rows = slice(None) if index == count - 2 and index % 2 == 0 else index % 2
        panels.append(figure.add_subplot(grid[rows, 1 + index // 2]))
    return figure, panels


def _draw_panel(panel: Axes, report: Report, x: Objective, y: Objective) -> None:
    on_front = {row["trial"] for row in report["front"]}
    others = _points((row for row in report["ranking"] if row["trial"] not in on_front), x, y)
    front = _points(report["front"], x, y)
    if others:
        panel.scatter(*_unzipped(others), s=18, color=_OTHER, linewidths=0, label="other complete trials")
    if front:
        panel.scatter(*_unzipped(front), s=40, color=_FRONT, zorder=3, label="front, with 95 % interval")
    _draw_budgets(panel, report["budgets"], x, y)
    published = _points((row for row in report["references"] if row["name"] == PUBLISHED), x, y)
    further = [at for row in report["references"] for at in _points([row], x, y)]
    for axis, name in enumerate("xy"):
        ends = _ends([at[axis] for at in (*front, *published)], [at[axis] for at in (*others, *further)], (x, y)[axis])
        panel.set(**{f"{name}lim": ends} if ends else {})
    _draw_intervals(panel, report["front"], x, y, _FRONT)
    _draw_bound(panel, front, x, y)
    right, up = (axis["direction"] == "max" for axis in (x, y))
    if outside := sum(_directions(panel, at) != (0, 0) for at in others):
        _write_in_corner(panel, f"{outside} complete outside", not right, not up)
    _write_in_corner(panel, _CORNERS[right, up], right, up, weight="bold")
    for row in report["references"]:
        _draw_intervals(panel, [row], x, y, _INK)
        for at in _points([row], x, y):
            _draw_reference(panel, at)
    panel.set_xlabel(_label(x), color=_INK)
    panel.set_ylabel(_label(y), color=_INK)
    panel.tick_params(length=0, labelcolor=_INK)
    panel.spines[:].set_color(_LINE)
    panel.grid(color=_LINE, linewidth=0.7)
    panel.set_axisbelow(True)
    panel.margins(_MARGIN)
    for scale in (panel.xaxis, panel.yaxis):
        if max(scale.get_view_interval()) >= _THOUSANDS:
            scale.set_major_formatter(EngFormatter(sep=" "))


def _write_in_corner(panel: Axes, text: str, right: bool, up: bool, weight: str = "normal") -> None:
    across, level = ("right" if right else "left"), ("top" if up else "bottom")
    panel.text(
        0.98 if right else 0.02,
        0.98 if up else 0.02,
        text,
        transform=panel.transAxes,
        ha=across,
        va=level,
        fontsize=9,
        color=_SOFT,
        weight=weight,
        zorder=5,
        bbox=_GROUND,
    )


def _draw_intervals(panel: Axes, rows: Iterable[Any], x: Objective, y: Objective, colour: str) -> None:
    for row in rows:
        for at in _points([row], x, y):
            (start, end), (low, high) = (
                interval(
                    row["objectives"][axis["name"]],
                    row["value_sd"][axis["name"]] or 0.0,  # unknown noise has no interval
                    METRICS[axis["metric"]].transform,
                )
                for axis in (x, y)
            )
            panel.plot((start, end), (at[1], at[1]), color=colour, alpha=0.35, linewidth=1)
            panel.plot((at[0], at[0]), (low, high), color=colour, alpha=0.35, linewidth=1)


def _draw_bound(panel: Axes, front: Sequence[Point], x: Objective, y: Objective) -> None:
    """Draws steps through the trials that no other one beats on both axes, to the edges, and shades what they beat."""
    if not front:
        return
    right, up = (axis["direction"] == "max" for axis in (x, y))
    (left_end, right_end), (bottom, top) = panel.get_xlim(), panel.get_ylim()
    worst, lowest = (left_end if right else right_end), (bottom if up else top)
    steps: list[Point] = []
    for at in sorted(front, key=lambda at: -at[0] if right else at[0]):
        level = steps[-1][1] if steps else lowest
        if not steps or (at[1] > level if up else at[1] < level):
            steps += [(at[0], level), at]
    steps.append((worst, steps[-1][1]))
    panel.plot(*_unzipped(steps), color=_BOUND, linewidth=2.2, zorder=2, label="boundary of the front on these axes")
    panel.fill(*_unzipped([*steps, (worst, lowest)]), color=_BOUND, alpha=0.07, linewidth=0, zorder=0)
    panel.set(xlim=(left_end, right_end), ylim=(bottom, top))


def _label_points(panel: Axes, report: Report, x: Objective, y: Objective, every: bool) -> None:
    """Rings and names the best trial, names references and, if `every`, others of the front where there is room."""
    to_pixels = panel.transData.transform
    references = [_at_edge(panel, at)[0] for at in _points(report["references"], x, y)]
    boxes = []
    for points, size in ((_points(report["ranking"], x, y), 4), (references, 8)):
        room = size * panel.figure.dpi / 72
        boxes += [Bbox.from_bounds(a - room, b - room, 2 * room, 2 * room) for a, b in map(to_pixels, points)]
    boxes += [text.get_window_extent() for text in panel.texts]
    best = _best(report)
    front = sorted(report["front"], key=lambda row: row["trial"] != best)
    for row in report["references"]:
        for at in _points([row], x, y):
            edge, figures = _at_edge(panel, at)
            _write_near(panel, " ".join([row["name"], *figures]), edge, boxes, _INK)
    for row in front:
        for at in _points([row], x, y):
            if row["trial"] == best:
                panel.scatter(*at, s=150, facecolors="none", edgecolors=_INK, linewidths=1.6, zorder=4)
                _write_near(panel, f"trial {best}", at, boxes, _INK, weight="bold")
            elif every:
                _write_near(panel, str(row["trial"]), at, boxes, _FRONT, needed=False)


def _best(report: Report) -> int | None:
    """Returns the trial that the headline names, else the first of the front."""
    headline = report["headline"] or {}
    if headline.get("named") is not None:
        return int(headline["named"])
    return next((int(row["trial"]) for row in report["front"]), None)


def _write_near(
    panel: Axes, text: str, at: Point, boxes: list[Bbox], colour: str, weight: str = "normal", needed: bool = True
) -> None:
    """Writes a text next to a point where it overlaps nothing; elsewhere only if `needed`."""
    inside = panel.get_window_extent()
    label = panel.annotate(
        text,
        at,
        xytext=(0, 0),
        textcoords="offset points",
        fontsize=8.5,
        color=colour,
        weight=weight,
        zorder=5,
        bbox=_GROUND,
    )

    def crowded(offset: tuple[int, int]) -> int:
        across, up = offset
        label.set(
            position=offset,
            ha="center" if not across else "left" if across > 0 else "right",
            va="center" if not up else "bottom" if up > 0 else "top",
        )
        box = label.get_window_extent()
        outside = bool(box.x0 < inside.x0 or box.x1 > inside.x1 or box.y0 < inside.y0 or box.y1 > inside.y1)
        return int(box.count_overlaps(boxes)) + outside * (1 + len(boxes))

    best = min(_AROUND, key=crowded)
    if crowded(best) and not needed:
        label.remove()
    else:
        boxes.append(label.get_window_extent())


def _ends(near: Sequence[float], others: Sequence[float], axis: Objective) -> Point | None:
    """Returns the ends of an axis over `near`, and over those of `others` that are no further away than its width.

    Over all if `near` has no width; None: there are no values, or they are all equal. The better end has more room, for
    the name of that corner.
    """
    width = max(near, default=0.0) - min(near, default=0.0)
    values = [*near, *(value for value in others if not width or min(near) - width <= value <= max(near) + width)]
    room = _MARGIN * (max(values, default=0.0) - min(values, default=0.0))
    low, high = (1.0, _BETTER) if axis["direction"] == "max" else (_BETTER, 1.0)
    return (min(values) - low * room, max(values) + high * room) if room else None


def _directions(panel: Axes, at: Point) -> tuple[int, int]:
    """Returns on which sides of a panel a point is: 0, or -1 and 1 below and beyond the ends of x and of y."""
    (start, end), (bottom, top) = panel.get_xlim(), panel.get_ylim()
    return int(at[0] > end) - int(at[0] < start), int(at[1] > top) - int(at[1] < bottom)


def _draw_reference(panel: Axes, at: Point) -> None:
    """Draws a star, or an arrow head at the edge of the panel."""
    across, up = _directions(panel, at)
    if not (across or up):
        panel.scatter(*at, s=130, marker="*", color=_INK, zorder=4, linewidths=0, label="reference")
        return
    angle = round(math.degrees(math.atan2(up, across))) - 90
    panel.scatter(*_at_edge(panel, at)[0], s=80, marker=(3, 0, angle), color=_INK, zorder=4, linewidths=0)


def _at_edge(panel: Axes, at: Point) -> tuple[Point, list[str]]:
    """Returns where a point is drawn: itself, or at the edge of the panel; and its figures that are outside of it."""
    across, up = _directions(panel, at)
    ends = (panel.get_xlim(), panel.get_ylim())
    x, y = (
        min(max(value, low + 0.04 * (high - low)), high - 0.04 * (high - low)) if side else value
        for value, (low, high), side in zip(at, ends, (across, up), strict=True)
    )
    sides = ((across, 0), at[0]), ((0, up), at[1])
    return (x, y), [f"{_ARROWS[side]} {show_number(value)}" for side, value in sides if side in _ARROWS]


def _points(rows: Any, x: Objective, y: Objective) -> list[Point]:
    """Returns the coordinates of the rows that have both."""
    values = [(row["objectives"].get(x["name"]), row["objectives"].get(y["name"])) for row in rows]
    return [(a, b) for a, b in values if a is not None and b is not None]


def _unzipped(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _draw_legend(figure: Figure, panels: Iterable[Axes]) -> None:
    """Draws one legend for all panels, each kind of mark once."""
    marks = {
        label: handle for panel in panels for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    if marks:
        figure.legend(
            marks.values(),
            marks.keys(),
            loc="outside lower center",
            ncols=min(len(marks), _LEGEND),
            frameon=False,
            fontsize=9,
        )


def _draw_budgets(panel: Axes, budgets: Sequence[Mapping[str, Any]], x: Objective, y: Objective) -> None:
    """Draws lines at the limits of budgets on an axis of this panel."""
    for budget in budgets:
        for axis, line in ((x, panel.axvline), (y, panel.axhline)):
            if budget["limit"] is not None and _is_of(budget, axis):
                line(budget["limit"], color=_BUDGET, linestyle="--", linewidth=1, label="budget")


def _is_of(budget: Mapping[str, Any], axis: Objective) -> bool:
    """Returns whether a budget limits the figure of an axis; one over several devices or runtimes is of ratios."""
    device, runtime, label = axis.get("device"), axis.get("runtime"), budget.get("runtime")
    # Either may have the quantisation behind the name.
    same_runtime = runtime is None or f"{runtime} ".startswith(f"{label} ") or f"{label} ".startswith(f"{runtime} ")
    same_figure = budget["metric"] == axis["metric"] and budget["workload"] == (axis["workload"] or "")
    return axis["aggregate"] is None and same_figure and same_runtime and device in (None, budget.get("device"))


def _label(objective: Objective) -> str:
    unit = f" [{objective['unit']}]" if objective["unit"] else ""
    at = f" at {objective['workload']}" if objective["workload"] else ""
    return f"{objective['name']}{at}{unit} {_ARROWS[0, 1 if objective['direction'] == 'max' else -1]}"


def _save(figure: Figure, file: Path | BinaryIO, kind: str) -> None:
    # No date in the file: equal results give equal bytes.
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type")) if kind == "svg" else None
    with matplotlib.rc_context({"svg.hashsalt": "hilnas", "svg.fonttype": "none"}):
        figure.savefig(file, format=kind, dpi=_DPI, metadata=metadata)
