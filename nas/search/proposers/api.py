"""Ask and tell: the interface between a study and the proposer of its layouts.

A proposer knows no Ray, no database and no device. It answers `ask` with layouts and learns from `tell`. Its proposals
depend on its seed, the number of proposals so far and the set of observations so far; not on the order of observations,
nor on time. So a recorded log, replayed with the same seed, gives the same proposals.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field, PlainSerializer, PlainValidator

from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.core.registry import Registry
from nas.search.proposers.sampling import Sampler

Status = Literal["running", "complete", "infeasible", "stopped", "failed", "withdrawn"]

MOST_COORDINATE = 600.0
"""Its exponential is finite. The logarithm of a ratio of two figures is below 70; a quality is rarely above 2."""
Coordinate = Annotated[float, Field(ge=-MOST_COORDINATE, le=MOST_COORDINATE)]
Deviation = Annotated[float, Field(ge=0, le=MOST_COORDINATE)]
RungNumber = Annotated[int, Field(ge=0, lt=1 << 15)]
StoredLayout = Annotated[Layout, PlainValidator(Layout.from_json), PlainSerializer(Layout.to_json)]


@dataclass(frozen=True)
class Proposal:
    """A layout to try.

    Args:
        layout: inside the space, and neither proposed nor observed before.
        number: counts the proposals of a study, from 0.
        operator: how it was made: 'reference', 'seed', 'random', 'crossover', or the name of an edit.
        parents: ids of the layouts that it was made from.
        engine: proposer and version that made it, such as 'ehvi/4'; another one proposes other layouts.
    """

    layout: Layout
    number: int
    operator: str
    parents: tuple[str, ...] = ()
    engine: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON form; without an engine where it is unknown."""
        origin = {"operator": self.operator, "parents": list(self.parents)}
        engine = {"engine": self.engine} if self.engine else {}
        return {"layout": self.layout.to_json(), "number": self.number, **origin, **engine}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Proposal:
        """Reads what `to_json` wrote."""
        origin = data["operator"], tuple(data["parents"]), data.get("engine", "")
        return Proposal(Layout.from_json(data["layout"]), data["number"], *origin)


@dataclass(frozen=True)
class Observation:
    """The results of a layout so far. A later observation of the same layout replaces the earlier.

    Example:
        >>> layout = Layout.parse("d64 v256 ffn=swiglu:96 [C3 A2/1]")
        >>> Observation(layout, "infeasible", {"latency": 1.25}, {"ttft@chat on local/llama.cpp": 0.1}).status
        'infeasible'

    Args:
        layout: proposed or not: reference layouts are observed too.
        status: 'running' while more will follow, 'complete' at the top rung, 'infeasible' beyond a budget, 'stopped'
            at a rung that did not promote it, 'failed' for the candidate's own failure, 'withdrawn' for one that is not
            run, or not to its end, for a reason that says nothing of the layout: it is neither pending nor proposed
            again, what is known of it counts, and a later observation replaces this one.
        objectives: name -> minimised coordinate, as far as known. An infeasible candidate has device coordinates and
            no quality; a stopped one has the quality of the rung it reached.
        constraints: budget -> log(figure / limit), of quality limit - figure; above 0 where it is broken, as far as
            known. That of quality is at `rung`, like its coordinate.
        rung: index of the rung that quality was taken at.
        noise: standard deviations, by name of the coordinate or budget, as far as known; others are estimated. That of
            a part is named 'OBJECTIVE/PART'.
        parts: objective -> part -> what the part adds to the coordinate, for objectives that are sums of parts; they
            add up to the coordinate.
    """

    layout: StoredLayout
    status: Status
    objectives: Mapping[str, Coordinate] = field(default_factory=dict)
    constraints: Mapping[str, Coordinate] = field(default_factory=dict)
    rung: RungNumber | None = None
    noise: Mapping[str, Deviation] = field(default_factory=dict)
    parts: Mapping[str, Mapping[str, Coordinate]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON form; without noise and parts where none are known."""
        figures = {"objectives": dict(self.objectives), "constraints": dict(self.constraints)}
        noise = {"noise": dict(self.noise)} if self.noise else {}
        parts = {"parts": {name: dict(values) for name, values in self.parts.items()}} if self.parts else {}
        return {"layout": self.layout.to_json(), "status": self.status, "rung": self.rung, **figures, **noise, **parts}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Observation:
        """Reads what `to_json` wrote."""
        layout = Layout.from_json(data["layout"])
        figures = data["objectives"], data["constraints"], data["rung"], data.get("noise", {})
        return Observation(layout, data["status"], *figures, data.get("parts", {}))


class Proposer(Protocol):
    """Chooses layouts for a study. Contract tests: `nas.testing.proposer_contract`.

    `nas.search.proposers.BaseProposer` implements all but the choice itself.

    Example:
        >>> from nas.search.proposers import make_proposer
        >>> from nas.search.spaces import load_space
        >>> proposer = make_proposer(Sampler(load_space("lfm2-demo")), "random")
        >>> (proposal,) = proposer.ask(1)
        >>> proposal.operator
        'random'
        >>> proposer.tell(Observation(proposal.layout, "stopped", {"latency": 0.1}, rung=0))
    """

    def ask(self, count: int) -> list[Proposal]:
        """Returns up to `count` new layouts; fewer only where the space has no more. `ask(2)` is `ask(1)` twice."""

    def tell(self, observation: Observation) -> None:
        """Learns from an observation. Telling the same one again changes nothing.

        Raises:
            InvalidInput: a coordinate or ratio that is not finite, or of no objective of the space.
        """

    def fix_reference_point(self, point: Mapping[str, float]) -> None:
        """Sets the point that hypervolume is measured from: objective -> worst minimised coordinate. Once in a study.

        Raises:
            InvalidInput: an objective is missing, or another point was set before.
        """

    def warm_start(self, earlier: Iterable[Observation]) -> None:
        """Learns from earlier studies, before the first proposal; their layouts are not on this study's front.

        Raises:
            InvalidInput: a coordinate that is not finite, or of no objective of the space.
        """

    def state(self) -> dict[str, Any]:
        """Returns all proposals and observations as JSON."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from the `state` of a proposer of the same space and seed.

        Raises:
            InvalidInput: the state is of another seed or version, or of another engine.
        """


class ProposerFactory(Protocol):
    """Makes a proposer; the values of the registry."""

    def __call__(self, sampler: Sampler, seed: int) -> Proposer: ...


PROPOSERS: Registry[ProposerFactory] = Registry(
    "proposer",
    "nas.proposers",
    {
        "random": "nas.search.proposers.evolution:RandomSearch",
        "evolution": "nas.search.proposers.evolution:Evolution",
        "ehvi": "nas.search.proposers.ehvi:EhviSearch",
        "cache-evolution": "nas.search.proposers.evolution:CacheEvolution",
    },
)


def check_finite(values: Mapping[str, float], what: str) -> None:
    """Raises `InvalidInput` for the first value that is not finite."""
    for name, value in values.items():
        if not abs(value) < float("inf"):
            raise InvalidInput(f"{what} {name!r} is {value}, not a finite number")
