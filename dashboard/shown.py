"""Numbers, times and stored text as pages show them: filters of the templates, and what all they write goes through."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

from markupsafe import Markup, escape

from nas.core.visible import visible

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


def instant(at: float) -> str:
    """As `moment`, with seconds."""
    return f"{datetime.datetime.fromtimestamp(at, datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"


def harmless(value: Any) -> Any:
    """Text, in which what would turn the reading direction or is not to be seen stands as its escape; else `value`.

    Markup is as it was made.
    """
    return visible(value, keep="\n\t") if isinstance(value, str) and not isinstance(value, Markup) else value


def verbatim(text: str) -> Markup:
    """Text that is to be sent back as it is, as in a field that people edit."""
    return escape(text)


FILTERS: dict[str, Callable[..., str]] = {
    "figure": figure,
    "hours": hours,
    "moment": moment,
    "instant": instant,
    "verbatim": verbatim,
}
