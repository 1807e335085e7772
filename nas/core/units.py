"""Parsing and formatting of quantities as people write them: '350M', '1.25x', '800ms', '1.010 (1.008 to 1.012)'.

Texts for people take their numbers from here, on pages and in commands. `showWithin` in dashboard/assets/plotting.js
follows `show_number` and `show_range`, and is tested with the same cases.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

from nas.core.errors import InvalidInput

_DECIMAL = r"\d{1,18}(?:\.\d{1,18})?"
_MOST_DIGITS = 6
_LEAST_SHARE = 1e-5
"""Shares below it are shown as 0."""
_COUNT = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
_UNITS = {
    **{"ms": ("ms", 1.0), "s": ("ms", 1e3), "MB": ("MB", 1.0), "GB": ("MB", 1e3), "tok/s": ("tok/s", 1.0)},
    **{"mJ": ("mJ", 1.0), "J": ("mJ", 1e3), "B": ("B", 1.0), "KB": ("B", 1e3), "docs/s": ("docs/s", 1.0)},
}


def parse_count(text: str | int | float) -> int:
    """Parses a number of weights: 350_000_000, '350M' or '8.3B'."""
    match = re.fullmatch(rf"\s*({_DECIMAL})\s*([KMB]?)\s*", str(text).replace("_", ""))
    if match is None:
        raise InvalidInput(f"{text!r} is not a count; write 350000000, '350M' or '8.3B'")
    count = Fraction(match[1]) * _COUNT[match[2]]
    if count.denominator > 1:
        raise InvalidInput(f"{text!r} is not a whole number")
    return count.numerator


def parse_size(text: str) -> int:
    """Parses a size of files: '500MB' -> 500000000 bytes; 0 needs no unit.

    Raises:
        InvalidInput: no size.
    """
    match = re.fullmatch(rf"\s*(?:({_DECIMAL})\s*([kMGT])B|0)\s*", text)
    if match is None:
        raise InvalidInput(f"{text!r} is not a size; use a value such as 500MB or 20GB")
    return int(Fraction(match[1]) * 1000 ** (1 + "kMGT".index(match[2]))) if match[1] else 0


def parse_duration(text: str) -> float:
    """Parses a duration: '90min' -> 5400 seconds; also 's', 'h' and 'd'.

    Raises:
        InvalidInput: no duration.
    """
    match = re.fullmatch(rf"\s*({_DECIMAL})\s*(s|min|h|d)\s*", text)
    if match is None:
        raise InvalidInput(f"{text!r} is not a duration; use a value such as 90min, 2h or 3d")
    return float(match[1]) * {"s": 1, "min": 60, "h": 3600, "d": 86_400}[match[2]]


def parse_limit(text: str | int | float, unit: str) -> tuple[float, bool]:
    """Parses a budget's limit: (value, relative). '1.25x' is relative to the reference; '800ms' must be of `unit`.

    Where `unit` is empty, a plain number is a value.

    Raises:
        InvalidInput: no positive number, or of another unit.
    """
    if isinstance(text, float) and math.isfinite(text):
        text = f"{Decimal(repr(text)):f}".removesuffix(".0")
    match = re.fullmatch(rf"\s*({_DECIMAL})\s*(x|ms|s|B|KB|MB|GB|tok/s|docs/s|mJ|J)?\s*", str(text))
    if match is None or float(match[1]) <= 0:
        raise InvalidInput(
            f"{text!r} is not a limit; write '1.25x' (of the reference) or a value such as '800ms' or '9MB'"
        )
    value, suffix = float(match[1]), match[2]
    if suffix == "x":
        return value, True
    if suffix is None and not unit:
        return value, False
    if suffix is None:
        raise InvalidInput(f"{text!r} has no unit; write '{text}{unit}', or '{text}x' for a multiple of the reference")
    base, scale = _UNITS[suffix]
    if base != unit:
        raise InvalidInput(f"{text!r} is in {base}, but this metric {f'is in {unit}' if unit else 'has no unit'}")
    return value * scale, False


def show_count(value: float) -> str:
    """Formats a count: 354483968 -> '354.5M'."""
    for suffix, scale in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= 0.99995 * scale:  # which four digits show as 1
            return f"{value / scale:.4g}{suffix}"
    return f"{value:.0f}"


def show_number(value: float, low: float | None = None, high: float | None = None, digits: int = 4) -> str:
    """Formats a number: 2498.3 -> '2498', with its 95 % interval 2420 to 2580 -> '2500'.

    With an interval, half of it (its narrower side) has one digit, or two where the first is 1, so that rounding is
    small beside it; there are at most six digits. An interval of a positive number over more than a factor of 10
    leaves two significant digits. Without one, there are at most `digits` significant digits and no zeros at the end.
    """
    place = _last_place(value, low, high)
    if place is None:
        text = f"{value:.{digits}g}"
        return f"{value:,.0f}" if "e+" in text else text
    return _rounded(value, place(value))


def show_range(value: float, low: float | None, high: float | None) -> str:
    """Formats the ends of a number's interval with its digits: '1.008 to 1.012'.

    Empty without an interval, and where six digits do not show one, such as that of an exact number.
    """
    place = _last_place(value, low, high)
    if place is None or low is None or high is None:
        return ""
    ends = [_rounded(end, place(end)) for end in (low, high)]
    return " to ".join(ends) if ends[0] != ends[1] else ""


def show_figure(value: float, low: float | None, high: float | None, unit: str = "") -> str:
    """Formats a value with its 95 % interval: '1.010 (1.008 to 1.012)', '298.1 MB (297.9 to 298.3)'."""
    ends = show_range(value, low, high)
    return f"{show_number(value, low, high)}{f' {unit}' if unit else ''}{f' ({ends})' if ends else ''}"


def show_spread(value: float, sd: float | None) -> str:
    """Formats a value with its standard deviation: '1.004 ± 0.001'."""
    if not sd:
        return show_number(value)
    place = _place(sd)
    return f"{_rounded(value, place)} ± {_rounded(sd, place)}"


def show_share(share: float, signed: bool = False) -> str:
    """Formats a share in percent: 0.284 -> '28 %', 0.043 -> '4.3 %', 0.00031 -> '0.031 %'; least 0.001 %."""
    percent = 100 * share if abs(share) >= _LEAST_SHARE else 0.0
    size, sign = abs(percent), "+" if signed else ""
    if (size >= 9.95 and not 99.5 <= size < 100) or not percent:
        return f"{percent:{sign}.0f} %"
    return f"{percent:{sign}.1f} %" if size >= 0.095 else f"{percent:{sign}.2g} %"


def show_duration(seconds: float, *, rough: bool = False) -> str:
    """Formats a duration: 5 s, 3 min 04 s, 1 h 02 min.

    Args:
        seconds: the duration.
        rough: with no more digits than an estimate has: 40 s, 8 min, 2 h 10 min, 14 h, 2 d 5 h.
    """
    if rough:
        return _rough_duration(seconds)
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {whole:02} s" if minutes else f"{whole} s"


def _rough_duration(seconds: float) -> str:
    if seconds < 95:
        return f"{max(5, round(seconds / 5) * 5) if seconds < 57 else round(seconds / 10) * 10} s"
    minutes = round(seconds / 60)
    if minutes >= 20:
        minutes = round(minutes / 5) * 5
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60) if minutes < 600 else (round(minutes / 60), 0)
    if hours < 48:
        return f"{hours} h" + (f" {minutes} min" if minutes else "")
    return f"{hours // 24} d" + (f" {hours % 24} h" if hours % 24 else "")


def _last_place(value: float, low: float | None, high: float | None) -> Callable[[float], int] | None:
    """Returns the power of ten of the last digit that a number of an interval shows; None without an interval."""
    if low is None or high is None or not all(map(math.isfinite, (value, low, high))):
        return None
    if low >= high:
        return None
    noise = min(value - low, high - value) if low < value < high else (high - low) / 2
    if low > 0 and (high > 10 * value or value > 10 * low):
        return lambda number: _place(number) - 1
    first = _place(noise)
    first -= noise < 2 * 10.0**first * (1 - 1e-9)
    place = max(first, _place(value) - _MOST_DIGITS + 1) if value else first
    return lambda _: place


def _place(value: float) -> int:
    """Returns the power of ten of the first digit of a number that is not 0."""
    return math.floor(math.log10(abs(value)) + 1e-9)  # 0.1 is not always the difference of 1.1 and 1


def _rounded(value: float, place: int) -> str:
    rounded = round(value, -place) + 0.0  # 0.0 instead of -0.0
    return f"{rounded:{',' if abs(value) >= 1e4 else ''}.{max(0, -place)}f}"
