"""Training curves: the loss of every run over its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from nas.dashboard.pictures.plot import HEIGHT, WIDTH, Point, across, course, frame, key, series, upright
from nas.dashboard.pictures.svg import picture


@dataclass(frozen=True, slots=True)
class Curve:
    """One run.

    Args:
        group: runs of one group share a colour, such as 'rung long, lm'.
        name: of the run itself, such as 'seed 1'.
        points: (step, loss), step ascending.
    """

    group: str
    name: str
    points: Sequence[Point]


def training_curves(curves: Sequence[Curve], label: str) -> Markup:
    """All runs on one pair of axes.

    Args:
        curves: those without a point are left out.
        label: what is trained.
    """
    drawn = [curve for curve in curves if curve.points]
    if not drawn:
        return picture("curves", f"{label}: no training yet", WIDTH, HEIGHT, [])
    x = across([0.0, *(step for curve in drawn for step, _ in curve.points)])
    y = upright([loss for curve in drawn for _, loss in curve.points])
    groups = list(dict.fromkeys(curve.group for curve in drawn))
    lines = [
        course(curve.points, x, y, f"line {series(groups.index(curve.group))}", f"{curve.group}, {curve.name}")
        for curve in drawn
    ]
    return picture("curves", label, WIDTH, HEIGHT, [*frame(x, y, "step", "loss, nats"), *lines, *key(groups)])
