"""Promotion by value: predictions between rungs, costs of stages, and decisions."""

from __future__ import annotations

import numpy as np
import pytest

from nas.core.pareto import hypervolume
from nas.core.quality_config import Rung
from nas.search.proposers.promotion import Arrival, ByValue, Ladder, StageCosts, gain_curve, learn_step

RUNGS = (Rung(name="a", lm_steps=10, keep=0.5), Rung(name="b", lm_steps=20, keep=0.5), Rung(name="c", lm_steps=40))


def ladder(costs: tuple[float, float, float] = (1.0, 1.0, 1.0)) -> Ladder:
    """Returns a ladder with finished references and the reference point (1, 1)."""
    made = Ladder(RUNGS, ByValue())
    made.reference_point = (1.0, 1.0)
    for reference, quality in ((-1, 0.5), (-2, 0.9)):
        for rung, seconds in enumerate(costs):
            made.finish(reference, rung, Arrival((quality, 0.5), 0.01), reference=True)
            made.costs.train(reference, rung, seconds)
    return made


def arrive(made: Ladder, trial: int, quality: float, other: float = 0.5, rung: int = 0) -> None:
    if rung == 0:
        made.enter(trial)
        made.costs.enter(trial, 1.0)
    made.finish(trial, rung, Arrival((quality, other), 0.01))


@pytest.mark.parametrize("axes", [2, 3, 4])
def test_gain_curves_are_exact(axes: int) -> None:
    rng = np.random.default_rng(axes)
    front, reference = rng.random((12, axes)), [1.0] * axes
    for _ in range(20):
        own = rng.random(axes) * 1.1
        added = hypervolume([*front, own], reference) - hypervolume(front, reference)
        found = gain_curve(own[1:], front, reference)
        assert found.gain(own[:1])[0] == pytest.approx(added, abs=1e-12)
        drawn = own[0] + 0.2 * rng.standard_normal(40_000)
        assert found.expected(own[:1], np.array([0.2]))[0] == pytest.approx(found.gain(drawn).mean(), abs=0.01)


def test_a_step_learns_shift_slope_and_how_good_forecasts_are() -> None:
    rng = np.random.default_rng(0)
    truth = rng.standard_normal(80)
    above = dict(enumerate(3 + truth))
    below = dict(enumerate(truth + rng.standard_normal(80)))
    alone = learn_step(below, above, {})
    helped = learn_step(below, above, dict(enumerate(3 + truth + 0.1 * rng.standard_normal(80))))
    assert alone.mean[1] == pytest.approx(0.5, abs=0.15)
    assert helped.mean[2] > 0.9
    assert helped.variance < 0.1 * alone.variance
    mean, _ = helped.predict(np.array([0.0]), 4.0)
    assert mean[0] == pytest.approx(4.0, abs=0.2)


def test_a_step_without_promotions_is_the_identity_with_a_wide_interval() -> None:
    step = learn_step({0: 1.0, 1: 3.0}, {}, {})
    mean, sd = step.predict(np.array([1.0, 3.0]), None)
    assert mean.tolist() == pytest.approx([1.0, 3.0])
    assert (sd > 0.5).all()


def test_costs_are_means_and_what_was_never_seen_follows_its_steps() -> None:
    costs = StageCosts(RUNGS)
    costs.enter(0, 4.0)
    costs.enter(1, 2.0)
    costs.train(0, 0, 10.0)
    assert costs.rung(0) == 10.0
    assert costs.rung(2) == 20.0  # 20 more steps, where 10 took 10 s
    assert costs.arrival == 16.0  # trial 1 was refused, and has to be paid for
    assert costs.confirmation == 3.0
    costs.confirm(0, 7.0)
    assert costs.confirmation == 7.0


def test_better_trials_are_promoted_and_hopeless_ones_are_not() -> None:
    made = ladder()
    made.complete = {50 + i: point for i, point in enumerate([(0.1, 0.6), (0.3, 0.3), (0.6, 0.1)])}
    for trial in range(12):
        arrive(made, trial, 0.05 if trial % 4 == 0 else 0.95, other=0.2 if trial % 4 == 0 else 0.9)
        made.decisions()
    assert {made.decided[trial, 0] for trial in (0, 4)} == {"promote"}
    assert all(made.decided.get((trial, 0)) != "promote" for trial in range(12) if trial % 4)


def test_at_most_six_trials_wait_at_a_rung() -> None:
    made = ladder()
    made.complete = {50: (0.0, 0.0)}
    for trial in range(30):
        arrive(made, trial, 0.5 + 0.01 * (trial % 7))
        made.decisions()
        assert len(made.waiting(0)) <= 6


def test_the_price_of_a_rung_decides_how_many_are_promoted() -> None:
    """A cheap top rung is reached by more trials than an expensive one, with the same qualities."""

    def promoted(top: float) -> int:
        made = ladder((1.0, 1.0, top))
        made.complete = {50: (0.3, 0.3)}
        rng = np.random.default_rng(3)
        for trial in range(24):
            arrive(made, trial, 0.4 + 0.1 * float(rng.standard_normal()), other=float(rng.uniform(0.1, 0.5)))
            made.decisions()
        return sum(verdict == "promote" for verdict in made.decided.values())

    assert promoted(1.0) > promoted(100.0)


def test_at_last_call_all_have_a_verdict_and_one_is_promoted() -> None:
    made = ladder()
    for trial in range(5):
        arrive(made, trial, 0.5, other=2.0)  # beyond the reference point: none can gain anything
    made.closed = True
    made.decisions()
    assert made.waiting(0) == []
    (first,) = (trial for (trial, _), verdict in made.decided.items() if verdict == "promote")
    arrive(made, first, 0.5, other=2.0, rung=1)
    made.decisions()
    assert made.decided[first, 1] == "promote"


def test_until_the_reference_point_is_fixed_shares_decide() -> None:
    made = ladder()
    made.reference_point = None
    for trial in range(4):
        arrive(made, trial, float(trial))
    assert sorted(decision.trial for decision in made.decisions()) == [0, 1]


def test_the_same_log_leads_to_the_same_decisions() -> None:
    def run() -> dict[tuple[int, int], str]:
        made, rng = ladder(), np.random.default_rng(5)
        for trial in range(40):
            arrive(made, trial, float(rng.uniform(0, 1)), other=float(rng.uniform(0, 1)))
            for decision in made.decisions():
                if decision.verdict == "promote" and decision.rung == 0:
                    arrive(made, decision.trial, float(rng.uniform(0, 1)), rung=1)
        return dict(made.decided)

    assert run() == run()
