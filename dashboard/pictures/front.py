"""The front over the cloud of all trials, on two axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from nas.dashboard.pictures.plot import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Limit, frame, limit_lines
from nas.dashboard.pictures.scale import LogScale, Scale, shown
from nas.dashboard.pictures.svg import Element, element, picture, points, titled

MOST_DOTS = 500
"""Of a larger cloud only one trial in each small square is drawn."""
_SQUARE = 8.0
_EDGE = 0.04
_STAR = 8.0


@dataclass(frozen=True, slots=True)
class PanelAxis:
    """An axis of the picture.

    Args:
        label: with its unit.
        log: equal ratios are equal distances; not where a figure is not above 0.
        limit: a budget.
    """

    label: str
    log: bool = False
    limit: Limit | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """A trial or a reference that is drawn by itself.

    Args:
        name: shows on hovering.
        at: x and y.
        low: lower ends of the intervals; None where there is none.
        high: upper ends.
        link: where it leads.
        strong: on the front, not tied with it only.
    """

    name: str
    at: tuple[float, float]
    low: tuple[float | None, float | None] = (None, None)
    high: tuple[float | None, float | None] = (None, None)
    link: str | None = None
    strong: bool = True


def front_picture(
    cloud: NDArray[np.float64], front: Sequence[Mark], stars: Sequence[Mark], x: PanelAxis, y: PanelAxis, label: str
) -> Markup:  # fmt: skip
    """The picture.

    Args:
        cloud: [P, 2].
        front: with error bars.
        stars: the reference layouts.
        x: the level axis.
        y: the upright one.
        label: what it shows, in words.
    """
    known = np.vstack([cloud.reshape(-1, 2), *(mark.at for mark in (*front, *stars))])
    if not len(known):
        return picture("front", f"{label}: no trial has both figures yet", WIDTH, HEIGHT, [])
    across, up = _scale(known[:, 0], x, LEFT, WIDTH - RIGHT), _scale(known[:, 1], y, HEIGHT - BOTTOM, TOP)
    shapes = frame(across, up, x.label, y.label)
    shapes += _dots(cloud, across, up)
    shapes += limit_lines([x.limit] if x.limit else [], x=across) + limit_lines([y.limit] if y.limit else [], y=up)
    for mark in front:
        shapes += _bars(mark, across, up)
    shapes += [_linked(mark, _disc(mark, across, up)) for mark in front]
    shapes += [_linked(mark, _star(mark, across, up)) for mark in stars]
    return picture("front", label, WIDTH, HEIGHT, shapes)


def _scale(figures: NDArray[np.float64], axis: PanelAxis, start: float, end: float) -> Scale:
    low, high = float(figures.min()), float(figures.max())
    if axis.log and low > 0:
        room = (high / low) ** _EDGE
        return LogScale(low / room, high * room, start, end)
    room = (high - low) * _EDGE
    return Scale(low - room, high + room, start, end)


def _dots(cloud: NDArray[np.float64], x: Scale, y: Scale) -> list[Element]:
    """One path with a dot for every trial: thousands of elements would be slow, and large."""
    if not len(cloud):
        return []
    dots = [(x(a), y(b)) for a, b in _thinned(cloud, x, y).tolist()]
    drawn = "".join(f"M{a:.1f} {b:.1f}h0" for a, b in dots)
    return [titled(element("path", d=drawn, class_="cloud"), f"{len(cloud)} trials")]


def _thinned(cloud: NDArray[np.float64], x: Scale, y: Scale) -> NDArray[np.float64]:
    if len(cloud) <= MOST_DOTS:
        return cloud
    across, up = (each - each.min() for each in (_square(cloud[:, 0], x), _square(cloud[:, 1], y)))
    first = np.full((across.max() + 1, up.max() + 1), -1)
    first[across[::-1], up[::-1]] = np.arange(len(cloud))[::-1]  # what is written last stays: no sorting
    return np.asarray(cloud[np.sort(first[first >= 0])])


def _square(figures: NDArray[np.float64], scale: Scale) -> NDArray[np.int64]:
    log = isinstance(scale, LogScale)
    low, high = (math.log(scale.low), math.log(scale.high)) if log else (scale.low, scale.high)
    places = (np.log(figures) if log else figures) - low
    width = abs(scale.end - scale.start) / _SQUARE
    return np.asarray(np.floor(places / ((high - low) or 1.0) * width), np.int64)


def _bars(mark: Mark, x: Scale, y: Scale) -> Iterable[Element]:
    across, up = x(mark.at[0]), y(mark.at[1])
    for axis, scale in enumerate((x, y)):
        low, high = mark.low[axis], mark.high[axis]
        if low is None or high is None:
            continue
        one, other = (scale(min(max(each, scale.low), scale.high)) for each in (low, high))
        if axis == 0:
            yield element("line", x1=one, x2=other, y1=up, y2=up, class_="error")
        else:
            yield element("line", x1=across, x2=across, y1=one, y2=other, class_="error")


def _disc(mark: Mark, x: Scale, y: Scale) -> Element:
    kind = "front" if mark.strong else "tied"
    return element("circle", cx=x(mark.at[0]), cy=y(mark.at[1]), r=4.5, class_=kind)


def _star(mark: Mark, x: Scale, y: Scale) -> Element:
    turns = [math.pi * (corner / 5 - 0.5) for corner in range(10)]
    radii = [_STAR if corner % 2 == 0 else 0.45 * _STAR for corner in range(10)]
    xs = [x(mark.at[0]) + radius * math.cos(turn) for radius, turn in zip(radii, turns, strict=True)]
    ys = [y(mark.at[1]) + radius * math.sin(turn) for radius, turn in zip(radii, turns, strict=True)]
    return element("polygon", points=points(xs, ys), class_="star")


def _linked(mark: Mark, shape: Element) -> Element:
    titled(shape, f"{mark.name}: {shown(mark.at[0])}, {shown(mark.at[1])}")
    return shape if mark.link is None else element("a", shape, href=mark.link)
