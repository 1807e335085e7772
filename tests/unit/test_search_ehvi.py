"""Expected hypervolume improvement against its definition, and what it is for: finding more than chance."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import spearmanr

from nas.core.layout import Layout
from nas.core.pareto import hypervolume
from nas.core.space import Budget
from nas.search.proposers import Observation, Sampler, Status, make_proposer
from nas.search.proposers.ehvi import Acquisition, EhviSearch, Improvement, log_chance_feasible, lowest
from nas.search.proposers.gp import Array
from nas.testing.synthetic import OBJECTIVES, SyntheticProblem, synthetic_space


def expected_improvement(mean: Array, sd: Array, front: Array, reference: list[float]) -> Array:
    return Improvement(front, reference, lowest(mean, sd)).expected(mean, sd)


@pytest.mark.parametrize("objectives", [2, 3, 4, 5])
def test_expectation_is_that_of_sampled_improvements(objectives: int) -> None:
    rng = np.random.default_rng(objectives)
    corner = np.ones(objectives)
    front = rng.uniform(0.3, 0.9, (4, objectives))
    mean, sd = rng.uniform(0.2, 0.9, (3, objectives)), rng.uniform(0.05, 0.2, (3, objectives))
    expected = expected_improvement(mean, sd, front, list(corner))
    before = hypervolume(front, corner)
    for index in range(3):
        outcomes = rng.normal(mean[index], sd[index], (1500, objectives))
        gains = [hypervolume(np.vstack([front, outcome]), corner) - before for outcome in outcomes]
        error = 4 * np.std(gains) / np.sqrt(len(gains)) + 0.03 * np.mean(gains)
        assert expected[index] == pytest.approx(np.mean(gains), abs=error)


def test_certain_gain_is_the_volume() -> None:
    tiny = np.full((2, 2), 1e-6)
    gains = expected_improvement(np.array([[0.5, 0.5], [1.5, 1.5]]), tiny, np.empty((0, 2)), [1.0, 1.0])
    assert gains == pytest.approx([0.25, 0.0], abs=0.003)


def test_dominated_certainty_gains_nothing() -> None:
    gain = expected_improvement(np.array([[0.6, 0.6]]), np.full((1, 2), 1e-6), np.array([[0.5, 0.5]]), [1.0, 1.0])
    assert gain == pytest.approx([0.0])


def test_chance_feasible_is_a_product() -> None:
    logs = log_chance_feasible(np.array([[0.0, -9.0], [0.0, 0.0], [9.0, -9.0]]), np.ones((3, 2)))
    assert np.exp(logs) == pytest.approx([0.5, 0.25, 0.0])
    assert np.exp(log_chance_feasible(np.empty((2, 0)), np.empty((2, 0)))) == pytest.approx([1.0, 1.0])


def reached(problem: SyntheticProblem, name: str, evaluations: int) -> float:
    proposer = make_proposer(Sampler(problem.space), name, seed=0)
    proposer.fix_reference_point(problem.reference_point)
    points = []
    for _ in range(evaluations // 4):
        for proposal in proposer.ask(4):
            points.append(problem.point(proposal.layout))
            proposer.tell(problem.observe(proposal.layout))
    corner = [problem.reference_point[name] for name in OBJECTIVES]
    return hypervolume([point for point in points if point is not None], corner)


def test_ehvi_finds_more_than_chance() -> None:
    problem = SyntheticProblem(3, space=synthetic_space(pool=32))
    assert reached(problem, "ehvi", 40) > 2 * reached(problem, "random", 40)


def test_pending_layouts_count_as_reached() -> None:
    """A layout that is still being measured lowers the gain of its like, so that parallel proposals spread."""
    problem = SyntheticProblem(0, space=synthetic_space(pool=32))
    scores = []
    for waits in (False, True):
        proposer = EhviSearch(Sampler(problem.space), seed=0)
        proposer.fix_reference_point({"quality": 4.0, "latency": 4.0, "memory": 6.0})
        for proposal in proposer.ask(24):
            observation = problem.observe(proposal.layout)
            proposer.tell(Observation(observation.layout, "complete", {"quality": 2.5} | dict(observation.objectives)))
        (best,) = proposer.ask(1)
        if not waits:
            proposer.tell(Observation(best.layout, "failed"))
        scores.append(proposer.score([best.layout])[0])
    assert scores[1] < 0.9 * scores[0]


def test_a_layout_that_waits_at_a_rung_does_not_keep_the_model_off() -> None:
    """Nor does it count as one under way: its value at the rung is known, and it may be stopped in the end."""
    problem = SyntheticProblem(0, space=synthetic_space(pool=32))
    proposer = EhviSearch(Sampler(problem.space), seed=0)
    proposer.fix_reference_point(problem.reference_point)
    (waiting,) = proposer.ask(1)
    proposer.tell(Observation(waiting.layout, "running", dict(problem.observe(waiting.layout).objectives), rung=0))
    for _ in range(20):
        (proposal,) = proposer.ask(1)
        proposer.tell(problem.observe(proposal.layout))
    proposer.ask(1)
    assert proposer.expected_gain is not None
    assert len(proposer.log.finished()) == 20
    assert waiting.layout in proposer.log.pending() and waiting.layout not in proposer.log.underway()


def optimise(proposer: EhviSearch, problem: SyntheticProblem, count: int) -> EhviSearch:
    proposer.fix_reference_point(problem.reference_point)
    for _ in range(count):
        for proposal in proposer.ask(1):
            proposer.tell(problem.observe(proposal.layout))
    return proposer


def test_a_warm_start_teaches_and_stays_off_the_front() -> None:
    """Earlier figures, all shifted as another device would, tell which of two layouts is better."""
    problem = SyntheticProblem(4, space=synthetic_space(pool=32))
    sampler, rng = Sampler(problem.space), np.random.default_rng(8)
    earlier = []
    for layout in (sampler.draw(rng) for _ in range(60)):
        figures = problem.truth(layout)
        shifted = {"quality": figures["quality"], "latency": np.log(figures["decode"]) + 0.7}
        earlier.append(Observation(layout, "complete", {**shifted, "memory": np.log(figures["memory"]) + 0.7}))
    cold = optimise(EhviSearch(sampler, 0), problem, 8)
    warm = EhviSearch(sampler, 0)
    warm.warm_start(earlier)
    optimise(warm, problem, 8)
    unseen = [sampler.draw(rng) for _ in range(40)]
    truth = [np.log(problem.truth(layout)["decode"]) for layout in unseen]
    misses = [np.abs(search.surrogate().predict(unseen)[0].mean[:, 1] - truth).mean() for search in (cold, warm)]
    assert misses[1] < 0.7 * misses[0]
    assert {observation.layout.id for observation in warm.log.feasible()}.isdisjoint(
        observation.layout.id for observation in earlier[:1]
    )
    again = EhviSearch(sampler, 0)
    again.restore(warm.state())
    assert again.ask(1) == warm.ask(1)


def test_a_budget_on_recall_is_learned_at_the_rung_it_was_taken_at() -> None:
    """At the lower rung everything recalls less; what is forecast, and avoided, is too little at the top."""
    plain = synthetic_space(pool=32)
    space = plain.model_copy(update={"budgets": (*plain.budgets, Budget(metric="quality.recall", min="0.95x"))})
    problem, sampler, rng = SyntheticProblem(4, space=space), Sampler(space), np.random.default_rng(8)

    def excess(layout: Layout) -> float:
        return 0.5 - sum(layer.mixers[0].kind == "gqa" for layer in layout.layers) / layout.depth

    proposer = EhviSearch(sampler, 0)
    proposer.fix_reference_point(problem.reference_point)
    top = len(space.quality.rungs) - 1
    for number, layout in enumerate(sampler.draw(rng) for _ in range(60)):
        observation, low = problem.observe(layout), number % 2
        constraints = {"quality.recall on the proxy": excess(layout) + 0.4 * low}
        status: Status = "stopped" if low else "complete"
        proposer.tell(
            Observation(layout, status, {"quality": 2.5, **observation.objectives}, constraints, 0 if low else top)
        )
    unseen = [sampler.draw(rng) for _ in range(40)]
    (forecast,) = proposer.surrogate().predict(unseen)[1].mean.T
    truth = np.array([excess(layout) for layout in unseen])
    assert np.abs(forecast - truth).mean() < 0.07
    scores = proposer.score(unseen)
    assert scores[truth > 0.15].max() < 0.1 * scores[truth < -0.1].max()


def test_layouts_are_told_apart_where_none_is_likely_to_keep_a_budget() -> None:
    """Chances of 1e-400 are 0 as numbers: the first of the pool was proposed, whatever it exceeds."""
    problem = SyntheticProblem(1, space=synthetic_space(pool=64))
    sampler, rng = Sampler(problem.space), np.random.default_rng(0)
    search = EhviSearch(sampler, 0)
    search.fix_reference_point(problem.reference_point)
    for layout in [sampler.draw(rng) for _ in range(24)]:
        excess, figures = {"memory": 3.0 + 0.1 * math.log(layout.params.total)}, problem.observe(layout).objectives
        search.tell(Observation(layout, "infeasible", figures, excess, noise={"memory": 1e-3}))
    layouts = [sampler.draw(rng) for _ in range(60)]
    assert (search.score(layouts) == 0).all()
    scores, excess_forecast = Acquisition(search, layouts).scores, search.surrogate().predict(layouts)[1]
    chances = -(excess_forecast.mean / excess_forecast.sd)[:, 0]
    assert spearmanr(scores, chances).statistic > 0.99


def test_expected_gain_shrinks_as_the_space_is_known() -> None:
    problem = SyntheticProblem(2, space=synthetic_space(pool=32))
    proposer = optimise(EhviSearch(Sampler(problem.space), 0), problem, 4)
    assert proposer.expected_gain is None
    gains = []
    for _ in range(50):
        for proposal in proposer.ask(1):
            proposer.tell(problem.observe(proposal.layout))
        if proposer.expected_gain is not None:
            gains.append(proposer.expected_gain)
    assert 0 < np.mean(gains[-10:]) < 0.5 * np.mean(gains[:10])


def test_all_that_is_left_of_a_list_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nas.search.proposers.ehvi._BOLD", 0.0)
    problem = SyntheticProblem(3, space=synthetic_space(pool=32))
    rng, free = np.random.default_rng(0), Sampler(problem.space)
    layouts = list({layout.id: layout for layout in (free.draw(rng) for _ in range(36))}.values())
    search = EhviSearch(Sampler.of(layouts, problem.space), 0)
    search.fix_reference_point(problem.reference_point)
    for proposal in search.ask(12):
        search.tell(problem.observe(proposal.layout))
    rest = search.untried()
    assert rest is not None and len(rest) == len(layouts) - 12
    scores = search.score(rest)
    (proposal,) = search.ask(1)
    assert proposal.operator == "listed" and proposal.layout == rest[int(np.argmax(scores))]
    assert search.expected_gain == pytest.approx(float(scores.max()))


def test_a_withdrawn_proposal_leaves_no_trace_in_the_model() -> None:
    problem = SyntheticProblem(3, space=synthetic_space(pool=32))
    search = EhviSearch(Sampler(problem.space), 0)
    search.fix_reference_point(problem.reference_point)
    for proposal in search.ask(12):
        search.tell(problem.observe(proposal.layout))
    others = [Sampler(problem.space).draw(np.random.default_rng(1)) for _ in range(5)]
    before = search.surrogate().predict(others)[0].sd
    (candidate,) = search.ask(1)
    pending = search.surrogate().predict([candidate.layout])[0].sd
    search.tell(Observation(candidate.layout, "withdrawn"))
    assert search.log.pending() == []
    assert (search.surrogate().predict([candidate.layout])[0].sd > pending).all()
    assert search.surrogate().predict(others)[0].sd == pytest.approx(before)
