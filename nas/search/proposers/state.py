"""The log of a search, and the base class of proposers, which keeps one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from nas.core.errors import InvalidInput, UnknownName
from nas.core.layout import Layout
from nas.core.pareto import ranks
from nas.search.proposers.api import Observation, Proposal, check_finite
from nas.search.proposers.heuristics import seed_layouts
from nas.search.proposers.sampling import Rng, Sampler, pick

Child = tuple[Layout, str, tuple[str, ...]]
"""A layout, its operator, and the ids of its parents."""

_VERSION = 1
_REDRAWS = 300


class SearchState:
    """The proposals and observations of a study; apart from the number of proposals, their order does not matter.

    Args:
        objectives: names, in the order of the space.
        seed: of all random choices.
    """

    def __init__(self, objectives: tuple[str, ...], seed: int) -> None:
        self.objectives = objectives
        self.seed = seed
        self.proposals: list[Proposal] = []
        self._proposed_ids: set[str] = set()
        self.observations: dict[str, Observation] = {}
        self.earlier: dict[str, Observation] = {}
        """Of other studies: models learn from them, but they are not on this study's front."""
        self.reference_point: tuple[float, ...] | None = None
        self.revision = 0
        """Grows with each observation, so that models can be cached."""

    def knows(self, layout: Layout) -> bool:
        """Returns whether `layout` was proposed or observed."""
        return layout.id in self.observations or layout.id in self._proposed_ids

    def add(self, proposal: Proposal) -> None:
        """Records a proposal."""
        self.proposals.append(proposal)
        self._proposed_ids.add(proposal.layout.id)

    def sorted_observations(self) -> list[Observation]:
        """Returns all observations, in the order of layout ids."""
        return [self.observations[key] for key in sorted(self.observations)]

    def prior(self) -> list[Observation]:
        """Returns observations of earlier studies, of layouts without one in this study, in the order of layout ids."""
        return [self.earlier[key] for key in sorted(self.earlier) if key not in self.observations]

    def finished(self) -> list[Observation]:
        """Returns final ones: of layouts that were never proposed, then of proposals in their order.

        A proposal that waits at a rung until the search ends keeps none of them out.
        """
        others = [
            observation for observation in self.sorted_observations() if observation.layout.id not in self._proposed_ids
        ]
        proposed = (self.observations.get(past.layout.id) for past in self.proposals)
        return [
            observation
            for observation in (*others, *proposed)
            if observation is not None and observation.status != "running"
        ]

    def complete(self) -> list[Observation]:
        """Returns complete ones with all objectives, in the order of layout ids."""
        whole = set(self.objectives)
        return [
            observation
            for observation in self.sorted_observations()
            if observation.status == "complete" and whole <= observation.objectives.keys()
        ]

    def pending(self) -> list[Layout]:
        """Returns proposed layouts without a final observation, in the order of proposals."""
        layouts = [past.layout for past in self.proposals]
        return [layout for layout in layouts if self.status(layout) in (None, "running")]

    def underway(self) -> list[Layout]:
        """Returns pending layouts that no rung has been observed of, in the order of proposals."""
        observations = self.observations
        return [
            layout for layout in self.pending() if layout.id not in observations or observations[layout.id].rung is None
        ]

    def status(self, layout: Layout) -> str | None:
        """Returns the status in the last observation of `layout`; None without one."""
        observation = self.observations.get(layout.id)
        return observation.status if observation else None

    def feasible(self) -> list[Observation]:
        """Returns complete ones that keep every budget: the candidates for the front."""
        return [observation for observation in self.complete() if _excess(observation) <= 0]

    def points(self, observations: list[Observation]) -> NDArray[np.float64]:
        """Returns [O, M] minimised coordinates."""
        rows = [[observation.objectives[name] for name in self.objectives] for observation in observations]
        return np.array(rows, dtype=np.float64).reshape(-1, len(self.objectives))

    def parents(self) -> list[tuple[int, Layout]]:
        """Returns layouts to breed from with their rank, 0 is best.

        First feasible ones by non-dominated rank, then those that were stopped or still run, then the infeasible by
        how far they broke a budget.
        """
        complete = self.feasible()
        order = [
            (int(rank), observation.layout)
            for rank, observation in zip(ranks(self.points(complete)), complete, strict=True)
        ]
        worst = max((rank for rank, _ in order), default=-1)
        order += [
            (worst + 1, observation.layout)
            for observation in self.sorted_observations()
            if observation.status in ("stopped", "running")
        ]
        order += [(worst + 1, observation.layout) for observation in self.prior() if observation.status == "complete"]
        over = [observation for observation in self.complete() if _excess(observation) > 0]
        late = [
            *over,
            *(observation for observation in self.sorted_observations() if observation.status == "infeasible"),
        ]
        late.sort(key=lambda observation: (_excess(observation), observation.layout.id))
        return order + [(worst + 2 + index, observation.layout) for index, observation in enumerate(late)]

    def tell(self, observation: Observation) -> None:
        """Records an observation, which replaces an earlier one of its layout."""
        self._check(observation)
        if self.observations.get(observation.layout.id) != observation:
            self.observations[observation.layout.id] = observation
            self.revision += 1

    def tell_earlier(self, observation: Observation) -> None:
        """Records an observation of another study."""
        self._check(observation)
        self.earlier[observation.layout.id] = observation
        self.revision += 1

    def _check(self, observation: Observation) -> None:
        for name in observation.objectives:
            if name not in self.objectives:
                raise UnknownName("objective", name, self.objectives)
        check_finite(observation.objectives, "objective")
        check_finite(observation.constraints, "constraint")
        check_finite(observation.noise, "noise of")
        for name, parts in observation.parts.items():
            check_finite(parts, f"part of {name!r}")

    def fix_reference_point(self, point: Mapping[str, float]) -> None:
        """Records the reference point."""
        if missing := [name for name in self.objectives if name not in point]:
            raise InvalidInput(f"the reference point lacks {', '.join(missing)}")
        check_finite(point, "reference point of")
        values = tuple(float(point[name]) for name in self.objectives)
        if self.reference_point not in (None, values):
            raise InvalidInput(f"the reference point is fixed at {self.reference_point}; it cannot become {values}")
        if self.reference_point is None:
            self.reference_point = values
            self.revision += 1

    def to_json(self) -> dict[str, Any]:
        """Returns the whole log as JSON."""
        return {
            "v": _VERSION,
            "seed": self.seed,
            "reference_point": None if self.reference_point is None else list(self.reference_point),
            "proposals": [proposal.to_json() for proposal in self.proposals],
            "observations": [observation.to_json() for observation in self.sorted_observations()],
            "earlier": [self.earlier[key].to_json() for key in sorted(self.earlier)],
        }

    def read_json(self, data: Mapping[str, Any]) -> None:
        """Replaces the log by one that `to_json` wrote.

        Raises:
            InvalidInput: of another version or seed.
        """
        if data.get("v") != _VERSION or data.get("seed") != self.seed:
            origin = f"version {data.get('v')} with seed {data.get('seed')}"
            raise InvalidInput(f"search state of {origin}; expected version {_VERSION} with seed {self.seed}")
        point = data["reference_point"]
        self.reference_point = None if point is None else tuple(point)
        self.proposals, self._proposed_ids = [], set()
        for item in data["proposals"]:
            self.add(Proposal.from_json(item))
        observations = [Observation.from_json(item) for item in data["observations"]]
        self.observations = {observation.layout.id: observation for observation in observations}
        past = [Observation.from_json(item) for item in data.get("earlier", ())]
        self.earlier = {observation.layout.id: observation for observation in past}
        self.revision += 1


def _excess(observation: Observation) -> float:
    """Returns the greatest excess over a budget; 0 where none is known."""
    return max(observation.constraints.values(), default=0.0)


class BaseProposer(ABC):
    """Implements `Proposer` around one method, `propose`. The first proposals are the heuristic seeds of the space.

    Example:
        >>> class First(BaseProposer):
        ...     engine = "first/1"
        ...
        ...     def propose(self, rng):
        ...         return self.sampler.draw(rng), "random", ()

    Args:
        sampler: of the space.
        seed: of all random choices.

    Attributes:
        engine: name and version; the version changes whenever the same log would lead to other proposals.
    """

    engine: ClassVar[str] = ""

    def __init__(self, sampler: Sampler, seed: int) -> None:
        self.sampler = sampler
        self.log = SearchState(tuple(objective.name for objective in sampler.space.objectives), seed)
        self._seeds: list[Layout] | None = None

    @abstractmethod
    def propose(self, rng: Rng) -> Child | None:
        """Returns a layout with its operator; None where none was found. It is called again if the layout is known."""

    def ask(self, count: int) -> list[Proposal]:
        proposals = []
        for _ in range(count):
            proposal = self._next()
            if proposal is None:
                break
            self.log.add(proposal)
            proposals.append(proposal)
        return proposals

    def tell(self, observation: Observation) -> None:
        self.log.tell(observation)

    def fix_reference_point(self, point: Mapping[str, float]) -> None:
        self.log.fix_reference_point(point)

    def state(self) -> dict[str, Any]:
        return self.log.to_json() | {"engine": self.engine}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a state; one without an engine is accepted."""
        if (engine := state.get("engine", self.engine)) != self.engine:
            raise InvalidInput(f"search state of engine {engine!r}; this is {self.engine!r}, whose proposals differ")
        self.log.read_json(state)

    def warm_start(self, earlier: Iterable[Observation]) -> None:
        """Learns from earlier studies, whose layouts may be proposed again and are modelled with an offset."""
        for observation in earlier:
            self.log.tell_earlier(observation)

    def seeds(self) -> list[Layout]:
        """Returns the layouts to begin with."""
        return seed_layouts(self.sampler, self.sampler.space.search.seeds)

    def _next(self) -> Proposal | None:
        number = len(self.log.proposals)
        if self._seeds is None:
            self._seeds = self.seeds()
        for layout in self._seeds:
            if not self.log.knows(layout):
                return Proposal(layout, number, "seed", engine=self.engine)
        untried = self.untried()
        if untried == []:
            return None
        rng = np.random.default_rng([self.log.seed, number])
        for _ in range(_REDRAWS):
            child = self.propose(rng)
            if child is None:
                break
            layout, operator, parents = child
            if not self.log.knows(layout) and self.sampler.admits(layout):
                return Proposal(layout, number, operator, parents, self.engine)
        if untried:
            return Proposal(pick(untried, rng), number, "random", engine=self.engine)
        return None

    def untried(self) -> list[Layout] | None:
        """Returns the layouts that are still to be tried; None where the space does not list its layouts."""
        listed = self.sampler.listed
        return None if listed is None else [layout for layout in listed.layouts if not self.log.knows(layout)]
