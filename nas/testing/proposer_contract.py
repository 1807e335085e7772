"""The contract of a proposer, as tests: subclass `ProposerContract`, give `factory`, and run pytest."""

from __future__ import annotations

import json
import math
from functools import cache
from typing import ClassVar

import numpy as np
import pytest

from nas.core.errors import InvalidInput, UnknownName
from nas.core.space import SearchSpace
from nas.search.proposers.api import Observation, Proposal, Proposer, ProposerFactory
from nas.search.proposers.sampling import Sampler
from nas.testing.synthetic import SyntheticProblem, synthetic_space

SEED = 3


class ProposerContract:
    """Properties that a study relies on.

    The subclass gives the fixture `factory`, which makes a proposer of a sampler and a seed.

    Attributes:
        pool: candidates scored per proposal; small, so that the tests are quick.
        rounds: batches of two that the tests ask for, enough to get past the first random or heuristic layouts.
    """

    pool = 24
    rounds = 8
    _searched: ClassVar[dict[object, tuple[list[Proposal], str]]] = {}

    @pytest.fixture
    def problem(self) -> SyntheticProblem:
        """Measures the layouts."""
        return _problem(self.pool)

    def start(self, factory: ProposerFactory, problem: SyntheticProblem, seed: int = SEED) -> Proposer:
        """Returns a new proposer with its reference point fixed."""
        proposer = factory(Sampler(problem.space), seed)
        proposer.fix_reference_point(problem.reference_point)
        return proposer

    def search(self, proposer: Proposer, problem: SyntheticProblem) -> list[Proposal]:
        """Runs a short search, two proposals at a time."""
        proposals: list[Proposal] = []
        for _ in range(self.rounds):
            batch = proposer.ask(2)
            for proposal in reversed(batch):
                proposer.tell(problem.observe(proposal.layout))
            proposals += batch
        return proposals

    def searched(self, factory: ProposerFactory, problem: SyntheticProblem) -> tuple[list[Proposal], str]:
        """Returns the proposals of a short search and its state as JSON; searched once for all tests of a proposer."""
        key = type(self), factory
        if key not in self._searched:
            proposer = self.start(factory, problem)
            self._searched[key] = self.search(proposer, problem), json.dumps(proposer.state())
        return self._searched[key]

    def resumed(self, factory: ProposerFactory, problem: SyntheticProblem) -> Proposer:
        """Returns a proposer that is where the short search ended."""
        proposer = factory(Sampler(problem.space), SEED)
        proposer.restore(json.loads(self.searched(factory, problem)[1]))
        return proposer

    def test_proposals_are_new_and_inside_the_space(self, factory: ProposerFactory, problem: SyntheticProblem) -> None:
        proposals, _ = self.searched(factory, problem)
        sampler = Sampler(problem.space)
        assert [reason for proposal in proposals for reason in sampler.contains(proposal.layout)] == []
        assert len({proposal.layout.id for proposal in proposals}) == len(proposals) == 2 * self.rounds
        assert [proposal.number for proposal in proposals] == list(range(len(proposals)))

    def test_observed_layouts_are_not_proposed(self, factory: ProposerFactory, problem: SyntheticProblem) -> None:
        first = self.start(factory, problem).ask(4)
        proposer = self.start(factory, problem)
        for proposal in first:
            proposer.tell(problem.observe(proposal.layout))
        observed = {proposal.layout.id for proposal in first}
        assert observed.isdisjoint(proposal.layout.id for proposal in proposer.ask(4))

    def test_support_filter_is_kept(self, factory: ProposerFactory, problem: SyntheticProblem) -> None:
        proposer = factory(Sampler(problem.space, lambda layout: layout.params.active == layout.params.total), SEED)
        kinds = {block.kind for p in proposer.ask(8) for layer in p.layout.layers for block in layer.blocks}
        assert "moe" not in kinds

    def test_same_seed_and_log_give_the_same_proposals(
        self, factory: ProposerFactory, problem: SyntheticProblem
    ) -> None:
        assert self.search(self.start(factory, problem), problem) == self.searched(factory, problem)[0]

    def test_another_seed_gives_others(self, factory: ProposerFactory, problem: SyntheticProblem) -> None:
        assert self.start(factory, problem, SEED + 1).ask(10) != self.start(factory, problem).ask(10)

    def test_order_of_telling_does_not_matter(self, factory: ProposerFactory, problem: SyntheticProblem) -> None:
        forward, backward = self.start(factory, problem), self.start(factory, problem)
        observations = [problem.observe(proposal.layout) for proposal in forward.ask(10)]
        backward.ask(10)
        for observation in observations:
            forward.tell(observation)
        for observation in reversed(observations):
            backward.tell(observation)
        assert forward.ask(2) == backward.ask(2)

    def test_two_asked_at_once_are_two_asked_in_turn(self, factory: ProposerFactory, problem: SyntheticProblem) -> None:
        together, apart = self.resumed(factory, problem), self.resumed(factory, problem)
        assert together.ask(2) == apart.ask(1) + apart.ask(1)

    def test_state_survives_json(self, factory: ProposerFactory, problem: SyntheticProblem) -> None:
        proposer = self.start(factory, problem)
        self.search(proposer, problem)
        proposer.ask(1)  # left pending
        state = json.loads(json.dumps(proposer.state()))
        again = factory(Sampler(problem.space), SEED)
        again.restore(state)
        assert again.state() == proposer.state()
        assert again.ask(2) == proposer.ask(2)

    def test_state_of_another_seed_is_refused(self, factory: ProposerFactory, problem: SyntheticProblem) -> None:
        with pytest.raises(InvalidInput, match="seed"):
            self.start(factory, problem, SEED + 1).restore(self.start(factory, problem).state())

    def test_partial_and_failed_observations_are_taken(
        self, factory: ProposerFactory, problem: SyntheticProblem
    ) -> None:
        proposer = self.start(factory, problem)
        for index, proposal in enumerate(proposer.ask(12)):
            observation = problem.observe(proposal.layout)
            device = {name: value for name, value in observation.objectives.items() if name != "quality"}
            observations = (
                Observation(proposal.layout, "failed"),
                Observation(proposal.layout, "running", device, observation.constraints),
                Observation(
                    proposal.layout, "stopped", device | {"quality": 2.5 + index / 100}, observation.constraints, 0
                ),
                Observation(proposal.layout, "infeasible", device, observation.constraints),
            )
            proposer.tell(observations[index % 4])
        assert len(proposer.ask(3)) == 3

    def test_search_starts_without_a_reference_point(self, factory: ProposerFactory, problem: SyntheticProblem) -> None:
        proposals = self.search(factory(Sampler(problem.space), SEED), problem)
        assert len(proposals) == 2 * self.rounds

    def test_reference_point_is_fixed_once(self, factory: ProposerFactory, problem: SyntheticProblem) -> None:
        proposer = self.start(factory, problem)
        proposer.fix_reference_point(problem.reference_point)
        with pytest.raises(InvalidInput, match="fixed"):
            proposer.fix_reference_point(problem.reference_point | {"quality": 9.0})
        with pytest.raises(InvalidInput, match="memory"):
            proposer.fix_reference_point({"quality": 1.0, "latency": 1.0})

    def test_values_that_are_not_finite_are_refused(self, factory: ProposerFactory, problem: SyntheticProblem) -> None:
        proposer = self.start(factory, problem)
        layout = proposer.ask(1)[0].layout
        for bad in (math.nan, math.inf):
            with pytest.raises(InvalidInput, match="latency"):
                proposer.tell(Observation(layout, "complete", {"latency": bad}))
        with pytest.raises(UnknownName, match="latency"):
            proposer.tell(Observation(layout, "complete", {"latancy": 1.0}))

    def test_a_small_space_runs_out(self, factory: ProposerFactory) -> None:
        problem = SyntheticProblem(1, space=_small_space())
        proposer = self.start(factory, problem)
        proposals = []
        while batch := proposer.ask(1):
            proposals += batch
            observation = problem.observe(batch[0].layout)
            proposer.tell(Observation(observation.layout, "complete", {"quality": 2.5} | dict(observation.objectives)))
        assert len({proposal.layout.id for proposal in proposals}) == len(proposals) == 8

    def test_a_list_is_tried_to_its_end(self, factory: ProposerFactory, problem: SyntheticProblem) -> None:
        rng, free = np.random.default_rng(5), Sampler(problem.space)
        layouts = {layout.id: layout for layout in (free.draw(rng) for _ in range(14))}
        sampler = Sampler.of(layouts.values(), problem.space)
        proposer = factory(sampler, SEED)
        proposer.fix_reference_point(problem.reference_point)
        proposals = []
        while batch := proposer.ask(2):
            assert not any(sampler.contains(proposal.layout) for proposal in batch)
            proposals += batch
            for proposal in batch:
                proposer.tell(problem.observe(proposal.layout))
        assert [proposal.number for proposal in proposals] == list(range(len(layouts)))
        assert {proposal.layout.id for proposal in proposals} == layouts.keys()

    def test_withdrawn_layouts_leave_only_what_was_learned(
        self, factory: ProposerFactory, problem: SyntheticProblem
    ) -> None:
        """A withdrawn layout is not proposed again, and the state with it survives JSON."""
        proposer = self.resumed(factory, problem)
        withdrawn = proposer.ask(2)
        for proposal in withdrawn:
            proposer.tell(Observation(proposal.layout, "withdrawn"))
        again = factory(Sampler(problem.space), SEED)
        again.restore(json.loads(json.dumps(proposer.state())))
        fresh = proposer.ask(2)
        assert fresh == again.ask(2)
        assert {proposal.layout.id for proposal in withdrawn}.isdisjoint(proposal.layout.id for proposal in fresh)


@cache
def _problem(pool: int) -> SyntheticProblem:
    return SyntheticProblem(1, space=synthetic_space(pool, seeds=4))


def _small_space() -> SearchSpace:
    data = synthetic_space(8, seeds=2).model_dump()
    data["mixers"] = {"conv": {"kernel": 3}, "gqa": {"heads": 16, "kv_heads": 4}}
    data["ffn"] = {"swiglu": {"width": 1024}}
    data["limits"] = {"conv": {"min": 1}, "gqa": {"min": 1}}
    data["model"] = {"d_model": 512, "depth": [2, 3], "vocab": 8192}
    return SearchSpace.model_validate(data)
