"""The simulation of the rule for budgets has the estimator's figures, and its error rates are small."""

from __future__ import annotations

import numpy as np
import pytest
from study_support import sample

from benchmarks.noise.budget_rule import Rates, estimate, simulate
from nas.measure.protocol.estimator import NOISE, read_times, slowness, time_figures


def test_it_estimates_as_the_protocol_does() -> None:
    times = [10.0, 10.1, 11.0, 10.4, 14.0]
    samples = [sample(ms) for ms in times]
    figure = time_figures(samples, read_times(samples, 2), slowness(None, None), 16)["ttft"]
    value, sd = estimate(np.log([times]), NOISE["wall"]["ttft"])
    assert float(np.exp(value[0])) == pytest.approx(figure.value)
    assert float(sd[0]) == pytest.approx(figure.log_sd)


def test_what_is_far_off_a_limit_is_told_and_luck_does_not_confirm_itself() -> None:
    rates = {(row.noise, row.off): row for row in simulate(1000)}

    def of(noise: float, off: float) -> Rates:
        return rates[noise, off]

    for noise in (0.01, 0.02, 0.04):
        assert of(noise, 0.05).end < 0.005 and of(noise, -0.05).end > 0.98
        assert of(noise, 0.01).end < 0.5 * of(noise, 0.01).confirmed, "the old rule let luck count twice"
    assert of(0.01, 0.10).bought < 0.1 < of(0.01, 0.0).bought, "more is bought near a limit only"
