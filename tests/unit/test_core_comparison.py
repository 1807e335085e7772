"""Comparisons with a reference: gains, the order of naming, and which of several layouts are better."""

from __future__ import annotations

import math

import pytest

from nas.core.comparison import Gain, better_of, gains, is_better, naming_order, tail
from nas.core.scoring import Axis

REFERENCE = [Axis(value=1, coordinate=-1.0, sd=0.01), Axis(value=1, coordinate=0.0, sd=0.01)]


def axes(quality: float, latency: float, sd: float | None = 0.01) -> list[Axis]:
    return [Axis(value=quality, coordinate=-quality, sd=sd), Axis(value=1, coordinate=math.log(latency), sd=sd)]


def test_a_gain_is_reference_minus_layout_with_the_noise_of_both() -> None:
    quality, latency = gains(axes(1.1, 0.5), REFERENCE)
    assert (quality.value, quality.sd) == pytest.approx((0.1, math.hypot(0.01, 0.01)))
    assert latency.value == pytest.approx(math.log(2))
    assert gains(axes(1.1, 0.5, None), REFERENCE)[0].bounds(0.025) == (-math.inf, math.inf)


def test_intervals_are_those_of_students_t_where_the_noise_is_estimated() -> None:
    assert Gain(1.0, 0.1).bounds(0.025) == pytest.approx((1 - 0.1 * 1.959964, 1 + 0.1 * 1.959964), abs=1e-6)
    assert Gain(1.0, 0.1, 4).bounds(0.025) == pytest.approx((1 - 0.1 * 2.776445, 1 + 0.1 * 2.776445), abs=1e-5)
    assert Gain(0.5, 0.0, 4).bounds(0.025) == (0.5, 0.5)


def test_better_is_better_in_something_and_worse_in_nothing() -> None:
    wins, equal, loses = Gain(0.1, 0.01), Gain(0.0, 0.01), Gain(-0.1, 0.01)
    assert is_better([wins, equal], 0.01, 0.01)
    assert not is_better([wins, loses], 0.01, 0.01)
    assert not is_better([equal, equal], 0.01, 0.01)
    assert not is_better([Gain(0.1, None), equal], 0.01, 0.01), "unknown noise is not certainty"


def test_the_front_is_named_in_the_order_of_what_stands_out() -> None:
    trials = {1: axes(0.5, 0.1), 2: axes(1.0, 0.9), 3: axes(1.0, 0.95), 4: axes(1.2, 1.3)}
    order = naming_order(trials, REFERENCE, [0.0, 1.0])
    assert order[0] == 2, "the others lose in something"
    assert set(order) == {1, 2, 4}, "3 is not on the front"
    assert order[1:] == [1, 4] or order[1:] == [4, 1]
    assert naming_order({}, REFERENCE, [0.0, 1.0]) == []


def test_each_layout_that_is_better_leaves_more_chance_to_the_others() -> None:
    clear, near = [Gain(1.0, 0.1)], [Gain(0.22, 0.1)]  # 10 and 2.2 standard deviations
    assert better_of({1: clear, 2: near}, 0.025) == [1, 2]
    assert better_of({2: near, 3: near}, 0.025) == [], "of two, each has half of the chance of a mistake"
    assert better_of({}, 0.025) == []


def test_the_chance_of_a_side_is_shared_by_the_statements() -> None:
    assert tail(1) == pytest.approx(0.025) and tail(5) == pytest.approx(0.005)
