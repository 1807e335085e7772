"""Numbers as people read them: no digit below the noise, one style of percent, plus-minus and durations."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from nas.core.units import (
    parse_limit,
    show_count,
    show_duration,
    show_figure,
    show_number,
    show_range,
    show_share,
    show_spread,
)

CASES = json.loads((Path(__file__).parents[1] / "data" / "numbers.json").read_text())
"""[value, low, high, text of the value, text of the interval]; pages' scripts are tested with the same ones."""


@pytest.mark.parametrize(("value", "low", "high", "number", "ends"), CASES)
def test_an_interval_decides_the_digits(
    value: float, low: float | None, high: float | None, number: str, ends: str
) -> None:
    assert (show_number(value, low, high), show_range(value, low, high)) == (number, ends)


@pytest.mark.parametrize("value", [0.0, 1.0, math.pi, 37.4, -0.123456])
@pytest.mark.parametrize("noise", [1e-4, 0.0037, 0.02, 0.5])
def test_the_last_digit_is_of_the_size_of_the_noise(value: float, noise: float) -> None:
    text = show_number(value, value - noise, value + noise)
    last = 10.0 ** -len(text.partition(".")[2])
    assert last <= noise * (1 + 1e-6)
    assert last > noise / 20
    assert abs(float(text) - value) <= last / 2 * (1 + 1e-6)


def test_a_figure_has_its_unit_and_its_interval() -> None:
    assert show_figure(298.1, 297.9, 298.3, "MB") == "298.1 MB (297.9 to 298.3)"
    assert show_figure(298.1, None, None, "MB") == "298.1 MB"
    assert show_figure(1.0, math.nan, math.inf) == "1"


def test_a_deviation_decides_the_digits() -> None:
    assert [show_spread(1.00412, 0.0012), show_spread(2498.3, 31.0), show_spread(1.0, None)] == [
        "1.004 ± 0.001",
        "2500 ± 30",
        "1",
    ]


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "0 %"), (0.284, "28 %"), (-0.284, "-28 %"), (0.043, "4.3 %"), (0.00031, "0.031 %"), (0.0996, "10 %"),
        (0.996, "99.6 %"), (1.0, "100 %"), (1.35, "135 %"),
    ],
)  # fmt: skip
def test_shares_have_one_style(share: float, text: str) -> None:
    assert show_share(share) == text
    assert show_share(share, signed=True) == (text if share < 0 else f"+{text}")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.6, "1 min 00 s"), (228, "3 min 48 s"), (1800, "30 min 00 s"), (3720, "1 h 02 min")],
)
def test_durations_are_minutes_below_an_hour(seconds: float, text: str) -> None:
    assert show_duration(seconds) == text


def test_limits_keep_their_digits() -> None:
    assert [parse_limit(limit, "")[0] for limit in (0.95123456789, 1e-5, 12345678.5)] == [
        0.95123456789,
        1e-5,
        12345678.5,
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(9999.4, "9999"), (9999.7, "10,000"), (10_000.0, "10,000"), (999.96, "1000"), (-9999.7, "-10,000")],
)
def test_a_number_that_is_rounded_up_has_no_exponent(value: float, text: str) -> None:
    assert show_number(value) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(999_949, "999.9K"), (999_960, "1M"), (999_999_999, "1B"), (354_483_968, "354.5M"), (999, "999")],
)
def test_a_count_has_three_digits_before_the_point(count: int, text: str) -> None:
    assert show_count(count) == text
