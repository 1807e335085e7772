"""Parsing and formatting of quantities as people write them: '350M', '1.25x', '800ms', '512MB'."""

from __future__ import annotations

import re

from nas.core.errors import InvalidInput

_DECIMAL = r"\d{1,18}(?:\.\d{1,18})?"
_COUNT = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9}
_UNITS = {
    **{"ms": ("ms", 1.0), "s": ("ms", 1e3), "MB": ("MB", 1.0), "GB": ("MB", 1e3), "tok/s": ("tok/s", 1.0)},
    **{"mJ": ("mJ", 1.0), "J": ("mJ", 1e3)},
}


def parse_count(text: str | int | float) -> int:
    """Parses a number of weights: 350_000_000, '350M' or '8.3B'.

    Raises:
        InvalidInput: not a count.
    """
    match = re.fullmatch(rf"\s*({_DECIMAL})\s*([KMB]?)\s*", str(text).replace("_", ""))
    if match is None:
        raise InvalidInput(f"{text!r} is no count; write 350000000, '350M' or '8.3B'")
    return round(float(match[1]) * _COUNT[match[2]])


def parse_limit(text: str | int | float, unit: str) -> tuple[float, bool]:
    """Parses a budget's limit: (value, relative). '1.25x' is relative to the reference; '800ms' must be of `unit`.

    Raises:
        InvalidInput: no positive number, or of another unit.
    """
    text = f"{text:g}" if isinstance(text, float) else text
    match = re.fullmatch(rf"\s*({_DECIMAL})\s*(x|ms|s|MB|GB|tok/s|mJ|J)?\s*", str(text))
    if match is None or float(match[1]) <= 0:
        raise InvalidInput(
            f"{text!r} is not a limit; write '1.25x' (of the reference) or a value such as '800ms' or '9MB'"
        )
    value, suffix = float(match[1]), match[2]
    if suffix == "x":
        return value, True
    if suffix is None:
        raise InvalidInput(f"{text!r} has no unit; write '{text}{unit}', or '{text}x' for a multiple of the reference")
    found, scale = _UNITS[suffix]
    if found != unit:
        raise InvalidInput(f"{text!r} is in {found}, but this metric is in {unit}")
    return value * scale, False


def show_count(value: float) -> str:
    """Formats a count: 354483968 -> '354.5M'."""
    for suffix, scale in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= scale:
            return f"{value / scale:.4g}{suffix}"
    return f"{value:.0f}"
