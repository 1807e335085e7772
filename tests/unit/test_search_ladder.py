"""Asynchronous successive halving: which trials are promoted, and when."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from nas.core.quality_config import Rung
from nas.search.proposers.promotion import Decision, Ladder, step_variance


def ladder(*keeps: float | int | None, trials: int = 0) -> Ladder:
    """Returns a ladder with a rung per share and a last one; `trials` are unfinished."""
    rungs = [Rung(name=f"r{i}", lm_steps=i + 1, keep=keep) for i, keep in enumerate((*keeps, None))]
    halving = Ladder(rungs)
    for trial in range(trials):
        halving.enter(trial)
    return halving


def verdicts(decisions: Sequence[Decision]) -> dict[int, str]:
    return {decision.trial: decision.verdict for decision in decisions}


def test_while_more_may_come_the_share_is_rounded_down() -> None:
    halving = ladder(0.5, trials=4)
    halving.finish(0, 0, (-1.0,))
    assert halving.decisions() == []
    halving.finish(1, 0, (-2.0,))
    assert halving.decisions() == [Decision(1, 0, "promote")]
    halving.finish(2, 0, (-3.0,))
    assert halving.decisions() == [Decision(2, 0, "promote")]  # half of three is one, and that one is better now
    assert halving.decisions() == []


def test_at_last_call_the_share_is_rounded_up_and_the_rest_stops() -> None:
    halving = ladder(0.5, trials=3)
    for trial, quality in ((0, 1.0), (1, 2.0), (2, 3.0)):
        halving.finish(trial, 0, (-quality,))
    assert verdicts(halving.decisions()) == {2: "promote"}
    halving.closed = True
    assert verdicts(halving.decisions()) == {1: "promote", 0: "stop"}


def test_a_rung_waits_for_those_still_below_it() -> None:
    halving = ladder(0.5, 0.5, trials=2)
    halving.closed = True
    halving.finish(0, 0, (-1.0,))
    assert halving.decisions() == []
    halving.leave(1)
    assert verdicts(halving.decisions()) == {0: "promote"}
    halving.finish(0, 1, (-1.0,))
    assert verdicts(halving.decisions()) == {0: "promote"}


def test_a_rung_that_keeps_a_number_waits_for_all() -> None:
    halving = ladder(2, trials=4)
    for trial in range(4):
        halving.finish(trial, 0, (float(-trial),))
        assert halving.decisions() == []
    halving.closed = True
    assert verdicts(halving.decisions()) == {3: "promote", 2: "promote", 1: "stop", 0: "stop"}


def test_a_rung_that_keeps_all_promotes_at_once() -> None:
    halving = ladder(None, trials=2)
    halving.finish(0, 0, (0.0,))
    assert verdicts(halving.decisions()) == {0: "promote"}


def test_of_equals_the_earlier_is_promoted() -> None:
    halving = ladder(0.5, trials=2)
    halving.closed = True
    halving.finish(1, 0, (-1.0, 2.0))
    halving.finish(0, 0, (-1.0, 2.0))
    assert verdicts(halving.decisions()) == {1: "promote", 0: "stop"}


def test_the_front_is_promoted_before_what_it_dominates() -> None:
    halving = ladder(0.5, trials=4)
    halving.closed = True
    for trial, point in enumerate([(-2.0, 5.0), (-1.0, 1.0), (-1.9, 6.0), (-0.5, 2.0)]):
        halving.finish(trial, 0, point)
    assert verdicts(halving.decisions()) == {0: "promote", 1: "promote", 2: "stop", 3: "stop"}


def test_decisions_of_an_earlier_process_are_kept() -> None:
    halving = ladder(0.5, trials=4)
    for trial, quality in ((0, 1.0), (1, 2.0), (2, 3.0)):
        halving.finish(trial, 0, (-quality,))
    halving.recall(0, 0, "promote")
    halving.recall(1, 0, "stop")
    halving.leave(3)
    halving.closed = True
    assert verdicts(halving.decisions()) == {2: "promote"}
    halving.finish(2, 1, (-3.0,))
    assert halving.decisions() == []  # trial 0 is on its way to that rung


def test_a_rung_does_not_wait_for_ended_trials() -> None:
    halving = ladder(0.5, trials=3)
    halving.closed = True
    halving.finish(0, 0, (-1.0,))
    halving.leave(1)
    assert halving.decisions() == []
    halving.leave(2)
    assert verdicts(halving.decisions()) == {0: "promote"}


@pytest.mark.parametrize("keep", [0.3, 0.5, 0.9, 1, 3, None])
def test_at_the_end_all_have_a_verdict(keep: float | int | None) -> None:
    halving = ladder(keep, trials=7)
    decisions = []
    for trial in range(7):
        halving.finish(trial, 0, (float(trial % 3), float(-trial)))
        decisions += halving.decisions()
    halving.closed = True
    decisions += halving.decisions()
    assert sorted(decision.trial for decision in decisions) == list(range(7))


def test_a_step_without_promotions_has_half_the_spread_of_the_rung_below() -> None:
    assert step_variance({0: 1.0, 1: 3.0}, {}) == pytest.approx(4 * 0.5**2 / 2)


def test_a_step_learns_how_far_the_rung_above_is_from_a_line() -> None:
    rng = np.random.default_rng(0)
    below = dict(enumerate(rng.standard_normal(80)))
    exact = {trial: 3 + 0.5 * quality for trial, quality in below.items()}
    noisy = {trial: quality + 0.3 * rng.standard_normal() for trial, quality in exact.items()}
    assert step_variance(below, exact) < 0.03
    assert step_variance(below, noisy) == pytest.approx(0.09, rel=0.4)
