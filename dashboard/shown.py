"""Numbers and times as pages show them: filters of the templates."""

from __future__ import annotations

import datetime
from collections.abc import Callable

_NONE = "\N{EN DASH}"


def figure(value: float | None, digits: int = 4) -> str:
    """A number with so many digits that count; a dash where there is none."""
    return _NONE if value is None else f"{value:.{digits}g}"


def hours(seconds: float) -> str:
    """Device time in hours; less than a tenth of one in minutes."""
    return f"{seconds / 3600:.1f} h" if seconds >= 360 else f"{seconds / 60:.1f} min"


def moment(at: float) -> str:
    """Seconds since the epoch as a date and time, in UTC."""
    return f"{datetime.datetime.fromtimestamp(at, datetime.UTC):%Y-%m-%d %H:%M} UTC"


FILTERS: dict[str, Callable[..., str]] = {"figure": figure, "hours": hours, "moment": moment}
