"""Reference runs of a device over time: how far each was off the calibration, and how warm the device was."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from nas.core.measurement import DRIFT_LIMIT
from nas.dashboard.pictures.plot import (
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
from nas.service.api_models import ReferenceRunView

_HOUR_S, _DAY_S = 3600.0, 86_400.0
_IN_HOURS_S = 3 * _DAY_S
_LIMITS = [Limit("limit", sign * 100 * DRIFT_LIMIT, "%") for sign in (1, -1)]


def drift_chart(runs: Sequence[ReferenceRunView], label: str, now: float) -> Markup:
    """A dot for each run, pale where something disturbed the device; the temperature as a line behind them.

    Args:
        runs: oldest first.
        label: where they ran.
        now: seconds since the epoch.
    """
    if not runs:
        return picture("drift", f"{label}: no reference runs yet", WIDTH, HEIGHT, [])
    hours = now - runs[0].at <= _IN_HOURS_S
    unit_s = _HOUR_S if hours else _DAY_S
    x = across([0.0, *(_ago(run, now, unit_s) for run in runs)])
    y = upright([limit.value for limit in _LIMITS] + [_off(run) for run in runs])
    shapes = frame(x, y, f"{'hours' if hours else 'days'}, 0 is now", "% off the calibration")
    shapes += _temperatures([(_ago(run, now, unit_s), run.temperature_c) for run in runs], x)
    shapes += limit_lines(_LIMITS, y=y)
    shapes += [_dot(run, x(_ago(run, now, unit_s)), y(_off(run))) for run in runs]
    return picture("drift", f"{label}: {len(runs)} reference runs", WIDTH, HEIGHT, shapes)


def _temperatures(course_: Sequence[tuple[float, float | None]], x: Scale) -> list[Element]:
    """One line, with an axis of its own at the right; nothing where the device does not tell."""
    known: list[Point] = [(at, told) for at, told in course_ if told is not None]
    if not known:
        return []
    degrees = [told for _, told in known]
    y = upright((min(degrees) - 1, max(degrees) + 1))
    title = f"temperature: {shown(min(degrees))} to {shown(max(degrees))} °C"
    return [
        element("text", text="°C", x=WIDTH - RIGHT, y=TOP - 4, text_anchor="start", class_="label temperature"),
        *upright_ticks(y, WIDTH - RIGHT, left=False),
        course(known, x, y, "temperature", title),
    ]


def _dot(run: ReferenceRunView, x: float, y: float) -> Element:
    warm = "" if run.temperature_c is None else f" at {shown(run.temperature_c)} °C"
    title = f"{_off(run):+.2f} %{warm}{'' if run.calm else ', disturbed'}"
    return titled(element("circle", cx=x, cy=y, r=3, class_="run" if run.calm else "run refused"), title)


def _ago(run: ReferenceRunView, now: float, unit_s: float) -> float:
    return min(0.0, (run.at - now) / unit_s)


def _off(run: ReferenceRunView) -> float:
    return 100 * (run.ratio - 1)
