"""Optuna's samplers as proposers: layouts as parameters, there and back, in any space."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.search.optuna_sampler import Encoding, OptunaSearch
from nas.core.space import SearchSpace
from nas.search.proposers import Observation, Sampler, make_proposer
from nas.search.proposers.evolution import CacheEvolution
from nas.search.spaces import load_space
from nas.testing.synthetic import SyntheticProblem, synthetic_space

SPACES = {"synthetic": synthetic_space(), "demo": load_space("lfm2-demo"), "mixed": load_space("lfm2-mixed")}


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_a_layout_is_encoded_and_decoded(space: SearchSpace) -> None:
    sampler, rng = Sampler(space), np.random.default_rng(4)
    encoding = Encoding(sampler)
    for layout in (sampler.draw(rng) for _ in range(30)):
        params = encoding.encode(layout, rng)
        assert params.keys() == encoding.distributions.keys()
        decoded = encoding.decode(params, rng)
        assert decoded is not None
        assert [layer.mixers for layer in decoded.layers] == [layer.mixers for layer in layout.layers]


def test_broken_budgets_are_constraints_and_need_a_quality() -> None:
    problem = SyntheticProblem(1, space=synthetic_space(24, seeds=4))
    proposer = make_proposer(Sampler(problem.space), "optuna-nsga2", 0)
    assert isinstance(proposer, OptunaSearch)
    observations = [problem.observe(proposal.layout) for proposal in proposer.ask(12)]
    for observation in observations:
        proposer.tell(observation)
    proposer.ask(1)
    trials = {trial.number: trial for trial in proposer._live().trials if trial.state.is_finished()}
    assert len(trials) == 12 and all(len(trial.values) == 3 for trial in trials.values())
    broken = sum(max(trial.constraints.values()) > 0 for trial in trials.values())
    assert broken == sum(observation.status == "infeasible" for observation in observations) > 0


def test_evolution_on_cache_and_quality_looks_at_nothing_else() -> None:
    problem = SyntheticProblem(1, space=synthetic_space(24, seeds=4))
    proposer = CacheEvolution(Sampler(problem.space), 0)
    layouts = [proposal.layout for proposal in proposer.ask(6)]
    layouts.sort(key=lambda layout: layout.kv_bytes(problem.space.workloads["chat"].window))
    for quality, layout in enumerate(reversed(layouts)):  # the more cache, the better, as the front has it
        proposer.tell(Observation(layout, "complete", {"quality": quality, "latency": 1.0 + quality, "memory": 1.0}))
    assert {rank for rank, _ in proposer.parents()} == {0}


def test_a_log_without_parameters_is_taken_up() -> None:
    """What a study restores from: proposals and observations, no more."""
    problem = SyntheticProblem(1, space=synthetic_space(24, seeds=4))
    proposer = make_proposer(Sampler(problem.space), "optuna-nsga2", 0)
    assert isinstance(proposer, OptunaSearch)
    for proposal in proposer.ask(6):
        proposer.tell(problem.observe(proposal.layout))
    again = make_proposer(Sampler(problem.space), "optuna-nsga2", 0)
    again.restore(proposer.log.to_json())
    (fresh,) = again.ask(1)
    assert fresh.number == 6 and fresh.layout.id not in proposer.log.observations


@pytest.fixture
def problem() -> SyntheticProblem:
    data = synthetic_space(24, seeds=4).model_dump()
    data["model"] |= {"d_model": 512, "leading_dense": 0, "depth": 2, "params": {"total": {"max": "40M"}}}
    data["ffn"] = {"swiglu": {"width": {"choices": [768, 1152, 1536, 2048], "scope": "layer"}}}
    return SyntheticProblem(1, space=SearchSpace.model_validate(data))


@pytest.mark.parametrize("engine", ["optuna-nsga2", "optuna-tpe", "optuna-gp"])
def test_a_study_as_it_really_goes(problem: SyntheticProblem, engine: str) -> None:
    """References without constraints, layouts that were measured in part, a failed one, and some still pending."""
    proposer = make_proposer(Sampler(problem.space), engine, 0)
    rng = np.random.default_rng(1)
    reference = problem.observe(Sampler(problem.space).draw(rng))
    proposer.tell(Observation(reference.layout, "complete", {"quality": 2.0} | dict(reference.objectives)))
    proposals = proposer.ask(16)
    for proposal in proposals[:13]:
        observation = problem.observe(proposal.layout)
        constraints = dict(list(observation.constraints.items())[: 1 + proposal.number % 3])
        status = "infeasible" if max(constraints.values()) > 0 else "complete"
        proposer.tell(
            Observation(observation.layout, status, {"quality": 2.0} | dict(observation.objectives), constraints)
        )
    proposer.tell(Observation(proposals[13].layout, "failed"))
    again = make_proposer(Sampler(problem.space), engine, 0)
    again.restore(proposer.state())
    fresh = proposer.ask(1)
    assert fresh[0].operator == "optuna"
    assert again.ask(1) == fresh
    assert isinstance(proposer, OptunaSearch)
    assert [trial.state.name for trial in proposer._live().trials].count("RUNNING") == 3


def test_earlier_studies_are_trials_of_their_own(problem: SyntheticProblem) -> None:
    proposer = make_proposer(Sampler(problem.space), "optuna-tpe", 0)
    assert isinstance(proposer, OptunaSearch)
    rng = np.random.default_rng(2)
    earlier = [problem.observe(Sampler(problem.space).draw(rng)) for _ in range(12)]
    proposer.warm_start(earlier)
    proposer.ask(1)
    assert sum(trial.state.is_finished() for trial in proposer._live().trials) == 12
    proposer.tell(problem.observe(earlier[0].layout))  # the same layout, as this study measures it
    proposer.ask(1)
    assert sum(trial.state.is_finished() for trial in proposer._live().trials) == 13
    again = make_proposer(Sampler(problem.space), "optuna-tpe", 0)
    again.restore(proposer.state())
    assert again.ask(3) == proposer.ask(3)


@pytest.mark.parametrize("engine", ["optuna-nsga2", "optuna-tpe"])
def test_listed_layouts_are_places(problem: SyntheticProblem, engine: str) -> None:
    rng, whole = np.random.default_rng(3), Sampler(problem.space)
    layouts = {layout.id: layout for layout in (whole.draw(rng) for _ in range(40))}
    proposer = make_proposer(Sampler.of(layouts.values(), problem.space), engine, 0)
    operators = []
    for _ in range(16):
        (proposal,) = proposer.ask(1)
        assert layouts.pop(proposal.layout.id) == proposal.layout
        operators.append(proposal.operator)
        proposer.tell(problem.observe(proposal.layout))
    assert set(operators) == {"seed", "optuna"}
