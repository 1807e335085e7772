"""How figures are spread: one as a histogram, several as cumulative shares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from markupsafe import Markup

from nas.dashboard.pictures.plot import (
    HEIGHT,
    WIDTH,
    Limit,
    Point,
    across,
    course,
    frame,
    key,
    limit_lines,
    series,
    upright,
)
from nas.dashboard.pictures.scale import Scale, shown
from nas.dashboard.pictures.svg import Element, element, picture, titled

MOST_BINS = 60
_CORNERS = 400


def histogram(figures: Sequence[float], label: str, unit: str, limits: Sequence[Limit] = ()) -> Markup:
    """How many figures lie where.

    Bins follow Freedman and Diaconis (1981): twice the interquartile range over the cube root of the count.

    Args:
        figures: any number; none: an empty picture that says so.
        label: what they are.
        unit: of theirs.
        limits: lines; the picture is as wide as the figures, so a limit far beyond them has none.
    """
    if not figures:
        return picture("histogram", f"{label}: no samples", WIDTH, HEIGHT, [])
    low, high, counts = _binned(figures)
    x, y = across((low, high)), upright((0, max(counts)))
    step = (high - low) / len(counts)
    bars = [_bar(x, y, low + step * place, low + step * (place + 1), count, unit) for place, count in enumerate(counts)]
    shapes = [*frame(x, y, unit, "samples"), *bars, *limit_lines(limits, x=x)]
    return picture("histogram", f"{label}: {len(figures)} samples", WIDTH, HEIGHT, shapes)


def cumulative(samples: Mapping[str, Sequence[float]], label: str, unit: str, limits: Sequence[Limit] = ()) -> Markup:
    """For each series the share of figures up to x, on one scale.

    Args:
        samples: name -> figures; names without any are told in the key.
        label: what they are.
        unit: of theirs.
        limits: lines.
    """
    known = [figure for figures in samples.values() for figure in figures]
    if not known:
        return picture("cumulative", f"{label}: no samples", WIDTH, HEIGHT, [])
    x, y = across(known), upright((0.0, 1.0))
    lines = [
        course(_shares(figures), x, y, f"line {series(number)}", f"{name}: median {shown(median(figures))} {unit}")
        for number, (name, figures) in enumerate(samples.items())
        if figures
    ]
    names = [name if figures else f"{name}: no samples" for name, figures in samples.items()]
    shapes = [*frame(x, y, unit, "share of samples"), *lines, *limit_lines(limits, x=x), *key(names, low=True)]
    return picture("cumulative", f"{label} of {', '.join(samples)}", WIDTH, HEIGHT, shapes)


def _binned(figures: Sequence[float]) -> tuple[float, float, list[int]]:
    low, high = min(figures), max(figures)
    if low == high:
        return low - 0.5, high + 0.5, [len(figures)]
    width = 2 * (_quantile(figures, 0.75) - _quantile(figures, 0.25)) / len(figures) ** (1 / 3)
    bins = min(MOST_BINS, math.ceil((high - low) / width)) if width else MOST_BINS
    counts = [0] * bins
    for figure in figures:
        counts[min(bins - 1, int((figure - low) / (high - low) * bins))] += 1
    return low, high, counts


def _bar(x: Scale, y: Scale, low: float, high: float, count: int, unit: str) -> Element:
    top = y(count)
    bar = element("rect", x=x(low), y=top, width=max(0.5, x(high) - x(low) - 0.5), height=y.start - top, class_="bar")
    return titled(bar, f"{shown(low)} to {shown(high)} {unit}: {count}")


def _shares(figures: Sequence[float]) -> list[Point]:
    """The steps' corners, of so many quantiles as a picture can show."""
    ordered = sorted(figures)
    corners: list[Point] = [(ordered[0], 0.0)]
    for number in range(1, min(len(ordered), _CORNERS) + 1):
        count = math.ceil(number * len(ordered) / min(len(ordered), _CORNERS))
        at = ordered[count - 1]
        corners += [(at, corners[-1][1]), (at, count / len(ordered))]
    return corners


def _quantile(figures: Sequence[float], share: float) -> float:
    ordered = sorted(figures)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
