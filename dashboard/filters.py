"""Filters and functions of the templates: formatted numbers and times, and escaped stored text."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from functools import partial
from typing import Any
from zlib import crc32

from markupsafe import Markup, escape

from nas.core.block import BLOCKS
from nas.core.logs import visible
from nas.core.units import show_duration, show_number, show_range

_NONE = "\N{EN DASH}"
_BUILTIN_HUES = 20
"""Colours of the block kinds of hilnas."""
_FURTHER_HUES = 4
"""Colours that other kinds share."""


def figure(value: float | None) -> str:
    """Returns a number; a dash for None."""
    return _NONE if value is None else show_number(value)


def between(value: float, low: float | None, high: float | None) -> Markup:
    """Returns the interval of a value, small, after a space; nothing where there is none to show."""
    ends = show_range(value, low, high)
    return Markup(' <small class="interval">{}</small>').format(ends) if ends else Markup("")


def show_bytes(count: float) -> str:
    """Returns a count of bytes, such as '12.58 MB'."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count:.0f} B"


def moment(at: float) -> Markup:
    """Returns seconds since the epoch as a date and time in UTC, which a script shows as how long ago it is."""
    return _time(at, "%Y-%m-%d %H:%M UTC")


def instant(at: float) -> Markup:
    """Returns the same as `moment`, with seconds."""
    return _time(at, "%Y-%m-%d %H:%M:%S UTC")


def _time(at: float, style: str) -> Markup:
    utc = datetime.datetime.fromtimestamp(at, datetime.UTC)
    element = Markup('<time datetime="{}" title="{}">{}</time>')
    return element.format(f"{utc:%Y-%m-%dT%H:%M:%SZ}", f"{utc:%Y-%m-%d %H:%M:%S UTC}", f"{utc:{style}}")


def hue(kind: str) -> int:
    """Returns the number of a block kind's colour, 0 to 23; kinds of other distributions share the last four."""
    number = BLOCKS[kind].hue if kind in BLOCKS else None
    return _BUILTIN_HUES + crc32(kind.encode()) % _FURTHER_HUES if number is None else number


def harmless(value: Any) -> Any:
    """Returns text with bidirectional controls and invisible characters escaped; other values and markup unchanged."""
    return visible(value, keep="\n\t") if isinstance(value, str) and not isinstance(value, Markup) else value


def verbatim(text: str) -> Markup:
    """Returns text without escaped controls, for fields whose content is sent back."""
    return escape(text)


def sentence(text: str) -> str:
    """Returns text with a capital first letter; names in it stay as they are, unlike with Jinja's `capitalize`."""
    return text[:1].upper() + text[1:]


FILTERS: dict[str, Callable[..., str]] = {
    "about": partial(show_duration, rough=True),
    "duration": show_duration,
    "figure": figure,
    "moment": moment,
    "instant": instant,
    "sentence": sentence,
    "verbatim": verbatim,
}
