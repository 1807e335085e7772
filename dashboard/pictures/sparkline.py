"""A course without axes, as small as a word."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from nas.dashboard.pictures.scale import Scale, shown
from nas.dashboard.pictures.svg import Element, element, picture, points, titled

WIDTH, HEIGHT, _EDGE = 120.0, 28.0, 2.0


def sparkline(course: Sequence[tuple[float, float]], label: str) -> Markup:
    """The course as a line, with a dot at its end.

    Args:
        course: (x, y), x ascending; empty: an empty picture that says so.
        label: what it is the course of.
    """
    if not course:
        return picture("sparkline", f"{label}: nothing yet", WIDTH, HEIGHT, [])
    across = Scale.over((x for x, _ in course), _EDGE, WIDTH - _EDGE)
    up = Scale.over((y for _, y in course), HEIGHT - _EDGE, _EDGE)
    xs, ys = [across(x) for x, _ in course], [up(y) for _, y in course]
    last = course[-1][1]
    line = element("polyline", points=points(xs, ys), class_="course")
    dot = element("circle", cx=xs[-1], cy=ys[-1], r=2, class_="last")
    shapes: list[Element] = [line, titled(dot, shown(last))]
    return picture("sparkline", f"{label}: {shown(course[0][1])} to {shown(last)}", WIDTH, HEIGHT, shapes)
