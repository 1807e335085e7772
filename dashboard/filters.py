"""Filters and functions of the templates: formatted numbers and times, and escaped stored text."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any
from zlib import crc32

from markupsafe import Markup, escape

from nas.core.block import BLOCKS
from nas.core.logs import visible
from nas.study.estimate import about

_NONE = "\N{EN DASH}"
_BUILTIN_HUES, _FURTHER_HUES = 11, 4


def figure(value: float | None, digits: int = 4) -> str:
    """Returns a number with `digits` significant digits; a dash for None."""
    return _NONE if value is None else f"{value:.{digits}g}"


def shown(value: float) -> str:
    """Returns a number with four significant digits, without an exponent below a million."""
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def show_bytes(count: float) -> str:
    """Returns a count of bytes, such as '12.58 MB'."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count:.0f} B"


def hours(seconds: float) -> str:
    """Returns device time in hours; below a tenth of an hour in minutes."""
    return f"{seconds / 3600:.1f} h" if seconds >= 360 else f"{seconds / 60:.1f} min"


def moment(at: float) -> str:
    """Returns seconds since the epoch as a date and time in UTC."""
    return f"{datetime.datetime.fromtimestamp(at, datetime.UTC):%Y-%m-%d %H:%M} UTC"


def instant(at: float) -> str:
    """Returns seconds since the epoch as a date and time in UTC, with seconds."""
    return f"{datetime.datetime.fromtimestamp(at, datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"


def hue(kind: str) -> int:
    """Returns the number of a block kind's colour, 0 to 14; kinds of other distributions share the last four."""
    own = BLOCKS[kind].hue if kind in BLOCKS else None
    return _BUILTIN_HUES + crc32(kind.encode()) % _FURTHER_HUES if own is None else own


def harmless(value: Any) -> Any:
    """Returns text with bidirectional controls and invisible characters escaped; other values and markup unchanged."""
    return visible(value, keep="\n\t") if isinstance(value, str) and not isinstance(value, Markup) else value


def verbatim(text: str) -> Markup:
    """Returns text without escaped controls, for fields whose content is sent back."""
    return escape(text)


FILTERS: dict[str, Callable[..., str]] = {
    "about": about,
    "figure": figure,
    "hours": hours,
    "moment": moment,
    "instant": instant,
    "verbatim": verbatim,
}
