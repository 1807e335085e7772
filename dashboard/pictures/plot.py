"""What pictures with axes share: the frame, lines at limits, keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nas.dashboard.pictures.scale import Scale, shown
from nas.dashboard.pictures.svg import Element, element, points, titled

WIDTH, HEIGHT = 640.0, 240.0
LEFT, RIGHT, TOP, BOTTOM = 56.0, 48.0, 14.0, 36.0
SERIES = 6
"""Colours of series; a seventh has the first one's."""
_KEY_ROW = 13.0

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Limit:
    """A budget's limit, or a reference's figure, as a line."""

    name: str
    value: float
    unit: str


def across(figures: Iterable[float]) -> Scale:
    """The x axis over `figures`."""
    return Scale.over(figures, LEFT, WIDTH - RIGHT)


def upright(figures: Iterable[float]) -> Scale:
    """The y axis over `figures`."""
    return Scale.over(figures, HEIGHT - BOTTOM, TOP)


def frame(x: Scale, y: Scale, x_label: str, y_label: str) -> list[Element]:
    """Both axes with ticks and what they count."""
    shapes = [
        element("line", x1=x.start, x2=x.end, y1=y.start, y2=y.start, class_="axis"),
        element("line", x1=x.start, x2=x.start, y1=y.start, y2=y.end, class_="axis"),
        element("text", text=x_label, x=(x.start + x.end) / 2, y=HEIGHT - 4, text_anchor="middle", class_="label"),
        element("text", text=y_label, x=x.start, y=y.end - 4, text_anchor="start", class_="label"),
    ]
    for tick in x.ticks():
        at = x(tick)
        shapes.append(element("line", x1=at, x2=at, y1=y.start, y2=y.start + 4, class_="axis"))
        shapes.append(element("text", text=shown(tick), x=at, y=y.start + 15, text_anchor="middle", class_="tick"))
    return shapes + upright_ticks(y, x.start, left=True)


def upright_ticks(y: Scale, at: float, *, left: bool) -> list[Element]:
    """Marks and figures of a y axis that stands at `at`, on its left or right side."""
    out, anchor = (-4, "end") if left else (4, "start")
    shapes = []
    for tick in y.ticks():
        shapes.append(element("line", x1=at, x2=at + out, y1=y(tick), y2=y(tick), class_="axis"))
        shapes.append(
            element("text", text=shown(tick), x=at + 1.5 * out, y=y(tick) + 3.5, text_anchor=anchor, class_="tick")
        )
    return shapes


def course(curve: Sequence[Point], x: Scale, y: Scale, kind: str, title: str) -> Element:
    """A line through figures; what it is shows on hovering."""
    corners = points([x(each) for each, _ in curve], [y(each) for _, each in curve])
    return titled(element("polyline", points=corners, class_=kind), title)


def limit_lines(limits: Iterable[Limit], *, x: Scale | None = None, y: Scale | None = None) -> list[Element]:
    """Lines at limits: upright ones on `x`, level ones on `y`. Limits beyond the picture have none."""
    shapes = []
    for limit in limits:
        title = f"{limit.name}: {shown(limit.value)} {limit.unit}".rstrip()
        if x is not None and x.inside(limit.value):
            at = x(limit.value)
            line = element("line", x1=at, x2=at, y1=TOP, y2=HEIGHT - BOTTOM, class_="limit")
        elif y is not None and y.inside(limit.value):
            at = y(limit.value)
            line = element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at, class_="limit")
        else:
            continue
        shapes.append(titled(line, title))
    return shapes


def key(names: Sequence[str], *, low: bool = False) -> list[Element]:
    """Which colour is which series, inside the frame's upper right, or `low` in its lower right."""
    top = HEIGHT - BOTTOM - 8 - _KEY_ROW * len(names) if low else TOP
    shapes = []
    for number, name in enumerate(names):
        y = top + 10 + _KEY_ROW * number
        shapes.append(element("circle", cx=WIDTH - RIGHT - 6, cy=y - 3.5, r=4, class_=f"dot {series(number)}"))
        shapes.append(
            element("text", text=name, x=WIDTH - RIGHT - 14, y=y, text_anchor="end", class_=f"key {series(number)}")
        )
    return shapes


def series(number: int) -> str:
    """The class that colours the series of that number."""
    return f"series-{number % SERIES}"
