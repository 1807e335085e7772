"""Every token's time over a measurement, repetition by repetition, with the device's temperature above it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from markupsafe import Markup

from nas.dashboard.pictures.plot import (
    BOTTOM,
    HEIGHT,
    RIGHT,
    TOP,
    WIDTH,
    Limit,
    Point,
    across,
    course,
    frame,
    limit_lines,
    upright,
    upright_ticks,
)
from nas.dashboard.pictures.scale import Scale, shown
from nas.dashboard.pictures.svg import Element, element, picture, titled

_BUCKETS = 500
"""Of tokens over the whole picture: each shows its least and its greatest."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """One repetition.

    Args:
        name: such as 'repetition 3, refused: the device throttled'.
        token_ms: milliseconds per token, in order.
        temperature_c: of the device beside it; None: not known.
        valid: whether it counts.
    """

    name: str
    token_ms: Sequence[float]
    temperature_c: float | None = None
    valid: bool = True


def latency_trace(stretches: Sequence[Stretch], label: str, limits: Sequence[Limit] = ()) -> Markup:
    """The tokens of all repetitions in the order in which they were decoded; refused ones are pale.

    Args:
        stretches: repetitions; those without tokens take no room.
        label: what is measured.
        limits: level lines, in ms.
    """
    shown_ = [stretch for stretch in stretches if stretch.token_ms]
    if not shown_:
        return picture("trace", f"{label}: no samples", WIDTH, HEIGHT, [])
    starts = [0, *accumulate(len(stretch.token_ms) for stretch in shown_)]
    x = across((0, starts[-1]))
    y = upright((0, max(max(stretch.token_ms) for stretch in shown_)))
    per_bucket = max(1, starts[-1] // _BUCKETS)
    shapes = frame(x, y, "token", "ms per token")
    for start, stretch in zip(starts, shown_, strict=False):
        shapes.append(element("line", x1=x(start), x2=x(start), y1=TOP, y2=HEIGHT - BOTTOM, class_="boundary"))
        curve = _thinned(stretch.token_ms, start, per_bucket)
        shapes.append(course(curve, x, y, "tokens" if stretch.valid else "tokens refused", stretch.name))
    shapes += _temperatures(shown_, starts, x) + limit_lines(limits, y=y)
    return picture("trace", f"{label}: {starts[-1]} tokens, {len(shown_)} repetitions", WIDTH, HEIGHT, shapes)


def _thinned(token_ms: Sequence[float], start: int, per_bucket: int) -> list[Point]:
    """The least and the greatest of each bucket, in their order, so that no peak is lost."""
    found: list[Point] = []
    for begin in range(0, len(token_ms), per_bucket):
        bucket = range(begin, min(begin + per_bucket, len(token_ms)))
        ends = {min(bucket, key=token_ms.__getitem__), max(bucket, key=token_ms.__getitem__)}
        found += [(float(start + place), token_ms[place]) for place in sorted(ends)]
    return found


def _temperatures(stretches: Sequence[Stretch], starts: Sequence[int], x: Scale) -> list[Element]:
    """One level line a repetition that knows it, with an axis of its own at the right."""
    known = [stretch.temperature_c for stretch in stretches if stretch.temperature_c is not None]
    if not known:
        return []
    y = upright((min(known) - 1, max(known) + 1))
    right = WIDTH - RIGHT
    shapes = [
        element("text", text="°C", x=right, y=TOP - 4, text_anchor="start", class_="label temperature"),
        *upright_ticks(y, right, left=False),
    ]
    for begin, end, stretch in zip(starts[:-1], starts[1:], stretches, strict=True):
        if stretch.temperature_c is not None:
            at = y(stretch.temperature_c)
            line = element("line", x1=x(begin), x2=x(end), y1=at, y2=at, class_="temperature")
            shapes.append(titled(line, f"{stretch.name}: {shown(stretch.temperature_c)} °C"))
    return shapes
