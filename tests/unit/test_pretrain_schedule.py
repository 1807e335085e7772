from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nas.train.pretrain.recipe import Schedule, Shape

SHAPES: tuple[Shape, ...] = ("linear", "cosine", "exponential", "sqrt")


def test_wsd_rises_stays_and_falls() -> None:
    rates = [Schedule(warmup=0.2, decay=0.4, final=0.0).factor(step, 10) for step in range(10)]
    assert rates == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0])


def test_wsdc_ends_constant_as_plm_has_it() -> None:
    rates = [Schedule(warmup=0.01, decay=0.3, constant=0.1, final=0.1).factor(step, 100) for step in range(100)]
    assert rates[0] == 1  # the only step of the warm-up has the peak
    assert set(rates[:60]) == {1.0}
    assert rates[89:] == pytest.approx([0.1] * 11)
    assert all(a > b for a, b in itertools.pairwise(rates[60:90]))


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_falls_from_the_peak_to_the_end(shape: Shape) -> None:
    rates = [Schedule(warmup=0, decay=1.0, final=0.1, shape=shape).factor(step, 50) for step in range(50)]
    assert rates[0] < 1
    assert rates[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in itertools.pairwise(rates))


def test_an_exponential_decay_has_one_ratio() -> None:
    rates = [Schedule(warmup=0, decay=1.0, final=0.01, shape="exponential").factor(step, 20) for step in range(20)]
    ratios = {round(b / a, 9) for a, b in itertools.pairwise(rates)}
    assert ratios == {round(0.01 ** (1 / 20), 9)}


@given(
    steps=st.integers(1, 300), warmup=st.floats(0, 0.4), decay=st.floats(0, 0.4), constant=st.floats(0, 0.2),
    final=st.floats(0, 1), shape=st.sampled_from(SHAPES),
)  # fmt: skip
def test_rates_stay_between_nothing_and_the_peak(
    steps: int, warmup: float, decay: float, constant: float, final: float, shape: Shape
) -> None:
    schedule = Schedule(peak=2.0, warmup=warmup, decay=decay, constant=constant, final=final, shape=shape)
    rates = [schedule.factor(step, steps) for step in range(steps)]
    assert all(-1e-12 <= rate <= 2 + 1e-12 for rate in rates)
    if constant * steps >= 1:
        assert rates[-1] == pytest.approx(2 * final)
