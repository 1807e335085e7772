"""A Ray Tune `Searcher` over any proposer, for users who run Ray Tune themselves.

Tune runs the trials; each gets `config["layout"]`, a one-line layout, and reports figures in their own units under the
names of the space's objectives and budgets. See docs/how-to/other-tools.md for a whole run. No other module imports
this one: `nas.search.proposers` needs no Ray.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ray.tune.search import Searcher

from nas.core.durable import write_durably
from nas.core.errors import InvalidInput, UnknownName
from nas.core.layout import Layout
from nas.core.metrics import METRICS, Metric
from nas.core.space import SearchSpace
from nas.search.proposers import Observation, Proposer, Sampler, Status, make_proposer

_VERSION = 1


class Figures:
    """Converts what a trial reports into an observation.

    A trial may report, each as a number above 0 in the unit of its metric (quality may be any number):

    - `NAME` of an objective, and `NAME_sd`, its standard deviation, where that is known;
    - the figure of a budget under the budget's name, such as `peak_rss@chat`.

    Args:
        space: for its objectives and budgets.
        published: budget -> figure of the published reference, for budgets that are multiples of it.

    Raises:
        InvalidInput: a relative budget without its figure.
    """

    def __init__(self, space: SearchSpace, published: Mapping[str, float]) -> None:
        self._objectives = {objective.name: METRICS[objective.metric] for objective in space.objectives}
        self._limits: list[tuple[str, Metric, float]] = []
        for budget in space.budgets:
            limit, relative = budget.limit
            if relative and budget.name not in published:
                raise InvalidInput(f"{budget.name} is relative to the published layout ({limit:g}x): pass `published`")
            most = limit * published[budget.name] if relative else limit
            self._limits.append((budget.name, METRICS[budget.metric], most))

    def point(self, values: Mapping[str, float]) -> dict[str, float]:
        """Returns the coordinates of values in their own units; raises `UnknownName` for a value of no objective."""
        for name in values:
            if name not in self._objectives:
                raise UnknownName("objective", name, self._objectives)
        return {name: _coordinate(name, self._objectives[name], value) for name, value in values.items()}

    def observation(self, layout: Layout, result: Mapping[str, Any]) -> Observation:
        """Returns the observation of a trial's last result: infeasible, complete, or stopped.

        Raises:
            InvalidInput: it has no figure of the space, or one that is not a valid number.
        """
        reported = {name: float(result[name]) for name in self._objectives if name in result}
        objectives = self.point(reported)
        excess: dict[str, float] = {}
        for name, metric, limit in self._limits:
            if name in result:  # several budgets may limit one figure
                over = _coordinate(name, metric, float(result[name])) - _coordinate(name, metric, limit)
                excess[name] = max(excess.get(name, -math.inf), over)
        if not objectives and not excess:
            names = ", ".join(dict.fromkeys([*self._objectives, *(name for name, _, _ in self._limits)]))
            raise InvalidInput(f"a trial reported none of {names}; it reported {', '.join(sorted(result))}")
        noise = {
            name: float(result[f"{name}_sd"]) / (value if self._objectives[name].transform == "log" else 1.0)
            for name, value in reported.items()
            if f"{name}_sd" in result
        }
        status: Status = "complete" if objectives.keys() == self._objectives.keys() else "stopped"
        if max(excess.values(), default=0.0) > 0:
            status = "infeasible"
        return Observation(layout, status, objectives, excess, noise=noise)


class HilnasSearcher(Searcher):
    """Suggests layouts to Ray Tune. `metric` and `mode` are the space's objectives: Tune need not be given any.

    A trial that ends in an error or without a result, after Tune's own retries, is the layout's failure. A trial that a
    scheduler stops counts with what it reported.

    Args:
        space: the search space.
        proposer: one of `nas.search.proposers.PROPOSERS`; default: the space's.
        seed: default: the space's.
        supported: whether a layout can be tried at all.
        published: budget -> figure of the published reference; needed for budgets such as `1.25x`.
        worst: objective -> the worst useful value, in its own unit: the reference point of hypervolume.

    Raises:
        UnknownName: no such proposer, or a value of no objective.
        InvalidInput: an objective is missing in `worst`, or a budget in `published`.
    """

    def __init__(
        self,
        space: SearchSpace,
        *,
        proposer: str | None = None,
        seed: int | None = None,
        supported: Callable[[Layout], bool] = lambda layout: True,
        published: Mapping[str, float] | None = None,
        worst: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__()
        self._figures = Figures(space, published or {})
        self._space, self._supported = space, supported
        self._engine, self._seed = proposer, seed
        self.proposer = self._fresh()
        if worst is not None:
            self.proposer.fix_reference_point(self._figures.point(worst))
        self._running: dict[str, Layout] = {}

    def _fresh(self) -> Proposer:
        return make_proposer(Sampler(self._space, self._supported), self._engine, self._seed)

    def __getstate__(self) -> dict[str, Any]:
        """Tune pickles the searcher with its experiment; the proposer is pickled as its JSON state."""
        return self.__dict__ | {"proposer": self.proposer.state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self.proposer = self._fresh()
        self.proposer.restore(state["proposer"])

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        """Returns the next layout, or `FINISHED` where the space has no more."""
        proposals = self.proposer.ask(1)
        if not proposals:
            return Searcher.FINISHED  # type: ignore[return-value] # Tune's contract, not its annotation
        self._running[trial_id] = proposals[0].layout
        return {"layout": proposals[0].layout.format()}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Learns the result of a suggestion.

        Raises:
            InvalidInput: the result has no figure of the space; see `Figures`.
        """
        layout = self._running.pop(trial_id, None)
        if layout is None:
            return  # not suggested here, or already observed
        failed = error or not result
        self.proposer.tell(Observation(layout, "failed") if failed else self._figures.observation(layout, result or {}))

    def save(self, checkpoint_path: str) -> None:
        """Writes all proposals and observations as JSON."""
        running = {trial: layout.to_json() for trial, layout in self._running.items()}
        state = {"v": _VERSION, "proposer": self.proposer.state(), "running": running}
        write_durably(Path(checkpoint_path), json.dumps(state, allow_nan=False).encode())

    def restore(self, checkpoint_path: str) -> None:
        """Reads what `save` wrote.

        Raises:
            InvalidInput: the file is of another version, seed or proposer.
        """
        state = json.loads(Path(checkpoint_path).read_bytes())
        if not isinstance(state, dict) or state.get("v") != _VERSION:
            raise InvalidInput(f"{checkpoint_path} holds no search state of version {_VERSION}")
        self.proposer.restore(state["proposer"])
        self._running = {trial: Layout.from_json(layout) for trial, layout in state["running"].items()}


def _coordinate(name: str, metric: Metric, value: float) -> float:
    """Returns a minimised coordinate: the logarithm where the metric is compared by ratios."""
    if not math.isfinite(value) or (metric.transform == "log" and value <= 0):
        raise InvalidInput(f"{name} is {value}, which is no figure in {metric.unit or 'numbers'}")
    scaled = math.log(value) if metric.transform == "log" else value
    return scaled if metric.direction == "min" else -scaled
