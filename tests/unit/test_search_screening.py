"""Screening: what a budget surely refuses is not proposed, and no forecast gets into a log."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hardware_devices import SPACE, draw, time_ms

from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.core.space import Budget, SearchSpace
from nas.search.proposers import Observation, Proposer, Sampler, make_proposer
from nas.search.proposers.screening import TRUSTED, Screen

HERE, THERE = "decode_p50@chat on a/llama.cpp", "decode_p50@chat on b/llama.cpp"
LAYOUTS = draw(60)
LIMIT = float(np.quantile([time_ms(layout) for layout in LAYOUTS], 0.3))
"""What three layouts in ten keep."""


def excess(layout: Layout, fast: float = 1.0) -> float:
    return math.log(time_ms(layout, fast=fast) / LIMIT * fast)


def told(layouts: Sequence[Layout], name: str = HERE) -> list[Observation]:
    return [Observation(layout, "infeasible", {}, {name: excess(layout)}) for layout in layouts]


def space(screen: float, proposer: str = "random") -> SearchSpace:
    search = SPACE.search.model_copy(update={"screen": screen, "proposer": proposer})
    return SPACE.model_copy(update={"search": search})


def run(proposer: Proposer, count: int) -> list[Layout]:
    asked = []
    for _ in range(count):
        (proposal,) = proposer.ask(1)
        asked.append(proposal.layout)
        proposer.tell(told([proposal.layout])[0])
    return asked


def test_chances_tell_what_keeps_a_budget_from_what_does_not() -> None:
    screen = Screen(SPACE)
    screen.learn(told(LAYOUTS[:30]), [])
    chances = screen.chances(LAYOUTS[30:])
    kept = np.array([excess(layout) for layout in LAYOUTS[30:]])
    assert (chances[kept > 0.1] < 0.2).all()
    assert (chances[kept < -0.1] > 0.8).all()


def test_with_few_measurements_nothing_is_refused() -> None:
    screen = Screen(SPACE)
    screen.learn(told(LAYOUTS[: TRUSTED - 1]), [])
    assert (screen.chances(LAYOUTS) == 1).all()


def test_budgets_on_quality_are_left_to_the_proposer() -> None:
    limited = SPACE.model_copy(update={"budgets": (Budget(metric="quality", min="0.9x"),)})
    screen = Screen(limited)
    screen.learn([replace(seen, constraints={"quality on the proxy": 1.0}) for seen in told(LAYOUTS[:30])], [])
    assert screen.models == {}


@pytest.mark.parametrize("earlier", [False, True])
def test_a_few_measurements_do_where_another_place_has_a_model(earlier: bool) -> None:
    """The other place is of this study, or of an earlier one."""
    screen = Screen(SPACE)
    here, there = told(LAYOUTS[5:35]), told(LAYOUTS[:4], THERE)
    screen.learn(there if earlier else [*here, *there], here if earlier else [])
    assert screen.models[THERE].base is not None
    chances = screen.chances(LAYOUTS[35:])
    kept = np.array([excess(layout) for layout in LAYOUTS[35:]])
    assert (chances[kept > 0.3] < 0.2).all()


def test_screened_search_proposes_more_of_what_keeps_the_budget() -> None:
    kept = {}
    for screen in (0.0, 0.2):
        proposer = make_proposer(Sampler(space(screen)), "random", seed=0)
        asked = run(proposer, 30)
        kept[screen] = sum(excess(layout) <= 0 for layout in asked[TRUSTED:])
        told_of = {Layout.from_json(seen["layout"]).id for seen in proposer.state()["observations"]}
        assert told_of == {layout.id for layout in asked}  # what was screened is nowhere in the log
    assert kept[0.2] >= kept[0.0] + 6


def test_what_is_proposed_follows_from_the_log_alone() -> None:
    first = make_proposer(Sampler(space(0.2)), "random", seed=0)
    run(first, 12)
    again = make_proposer(Sampler(space(0.2)), "random", seed=0)
    again.restore(first.state())
    assert again.ask(2) == first.ask(2)


def test_where_nothing_is_likely_to_keep_the_budget_the_likeliest_is_proposed() -> None:
    proposer = make_proposer(Sampler(space(0.99)), "random", seed=0)
    for layout in LAYOUTS[:20]:
        proposer.tell(Observation(layout, "infeasible", {}, {HERE: excess(layout) + 2.0}))
    assert len(proposer.ask(2)) == 2


def test_a_sampler_of_optuna_cannot_be_screened() -> None:
    with pytest.raises(InvalidInput, match="cannot be screened"):
        make_proposer(Sampler(space(0.2)), "optuna-tpe", seed=0)
