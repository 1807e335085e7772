"""Speed over size, with every model by its name: members of a family among others' models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from nas.core.units import show_count
from nas.dashboard.pictures.plot import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, frame
from nas.dashboard.pictures.scale import LogScale, shown
from nas.dashboard.pictures.svg import Element, element, picture, titled

_ROOM = 1.25
"""Factor between the outermost models and the ends of the axes."""
_LETTER = 5.5
_MILLION = 1e6


@dataclass(frozen=True, slots=True)
class Model:
    """One model.

    Args:
        name: stands beside its point.
        parameters: how many it has.
        value: its figure.
        low: lower end of its interval; None where there is none.
        high: upper end.
        member: of the family.
    """

    name: str
    parameters: int
    value: float
    low: float | None
    high: float | None
    member: bool


def sizes_picture(models: Sequence[Model], unit: str, label: str) -> Markup:
    """Both axes are logarithmic; members of the family are filled.

    Args:
        models: those without a figure are left out by who asks.
        unit: of the figures.
        label: what is shown, in words.
    """
    if not models:
        return picture("sizes", f"{label}: nothing was measured", WIDTH, HEIGHT, [])
    sizes, values = [each.parameters / _MILLION for each in models], [each.value for each in models]
    x = LogScale(min(sizes) / _ROOM, max(sizes) * _ROOM, LEFT, WIDTH - RIGHT)
    y = LogScale(min(values) / _ROOM, max(values) * _ROOM, HEIGHT - BOTTOM, TOP)
    shapes = frame(x, y, "million parameters", unit)
    taken: list[tuple[float, float]] = []
    for each in sorted(models, key=lambda model: (not model.member, model.name)):
        shapes += _point(each, x, y, unit, taken)
    return picture("sizes", label, WIDTH, HEIGHT, shapes)


def _point(each: Model, x: LogScale, y: LogScale, unit: str, taken: list[tuple[float, float]]) -> list[Element]:
    at = x(each.parameters / _MILLION), y(each.value)
    kind = "member" if each.member else "other"
    shapes = []
    if each.low and each.high:
        ends = [y(min(max(end, y.low), y.high)) for end in (each.low, each.high)]
        shapes.append(element("line", x1=at[0], x2=at[0], y1=ends[0], y2=ends[1], class_=f"{kind}-interval"))
    dot = element("circle", cx=at[0], cy=at[1], r=4.0, class_=kind)
    shapes.append(titled(dot, f"{each.name}, {show_count(each.parameters)} parameters: {shown(each.value)} {unit}"))
    left = at[0] + 8 + _LETTER * len(each.name) > WIDTH
    beside = at[0] - 8 if left else at[0] + 8
    level = _free(beside, at[1] + 3.5, taken)
    anchor = "end" if left else "start"
    shapes.append(element("text", text=each.name, x=beside, y=level, text_anchor=anchor, class_=f"{kind}-name"))
    return shapes


def _free(across: float, level: float, taken: list[tuple[float, float]]) -> float:
    """The level, or one below where no name stands nearby."""
    while any(abs(across - x) < 90 and abs(level - y) < 10 for x, y in taken):
        level += 10
    taken.append((across, level))
    return level
