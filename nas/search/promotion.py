"""Promotion by value: a candidate climbs where it is expected to gain more hypervolume than its seconds gain elsewhere.

Each rung is an option on the next: after it, a candidate may still be stopped. So the value of climbing is found from
the top down (backward induction over the qualities that the next rung may show), with every second charged at the rate
that the study earns otherwise. That rate is the one at which a new candidate is worth exactly what it costs to bring it
to the lowest rung (renewal reward; Charnov 1976, "Optimal foraging, the marginal value theorem"). It is found from the
candidates that came last, so it falls by itself as the front fills and rises with the price of a stage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nas.core.pareto import front_mask
from nas.search.halving import Shares
from nas.search.ladder import Arrival, Decision, Ladder
from nas.search.rung_model import Array, learn_steps
from nas.search.slices import slices

_RECENT = 24
"""Candidates that say what a new one is worth."""
_PATIENCE = 6
"""Later arrivals at its rung that a candidate waits for: what is known of rungs and rates changes."""
_NODES, _NODE_WEIGHTS = np.polynomial.hermite_e.hermegauss(9)
_NODE_WEIGHTS = _NODE_WEIGHTS / _NODE_WEIGHTS.sum()
_HALVINGS = 40


class ByValue:
    """Promotes whoever is worth it. Until the reference point is fixed, shares decide."""

    def __init__(self) -> None:
        self._shares = Shares()
        self._last: tuple[int, Outlook, float] | None = None

    def decide(self, ladder: Ladder, rung: int, last_call: bool) -> Decision | None:
        """See `Policy.decide`."""
        if ladder.reference_point is None:
            return self._shares.decide(ladder, rung, last_call=False)
        outlook, rate = self._outlook(ladder)
        waiting = ladder.waiting(rung)
        worth = outlook.options(waiting, rung).worth(rate).tolist()
        best = int(np.argmax(worth))
        nobody = last_call and not ladder.complete and not ladder.on_way and rung == _highest(ladder)
        if worth[best] > 0 or nobody:
            return Decision(waiting[best], rung, "promote", _why(worth[best], rate))
        arrived = list(ladder.arrived[rung])
        for trial, gain in zip(waiting, worth, strict=True):
            if last_call or len(arrived) - arrived.index(trial) > _PATIENCE:
                return Decision(trial, rung, "stop", _why(gain, rate))
        return None

    def _outlook(self, ladder: Ladder) -> tuple[Outlook, float]:
        """As the ladder stands; those who were stopped change nothing."""
        if self._last is None or self._last[0] != ladder.revision:
            outlook = Outlook(ladder)
            self._last = ladder.revision, outlook, outlook.rate()
        return self._last[1:]


@dataclass(frozen=True)
class Options:
    """What climbing from a rung may lead to, for several candidates.

    Args:
        gains: [N, 9 ** n] expected gains in hypervolume at the top, by what the n rungs between may show.
        costs: seconds of the next rung first, the top with its confirmation last: n + 1 of them.
    """

    gains: Array
    costs: Sequence[float]

    def worth(self, rate: float) -> Array:
        """[N] expected gain less all seconds at `rate`; the first step is taken, later ones only where they pay."""
        value = self.gains - rate * self.costs[-1]
        for seconds in reversed(self.costs[:-1]):
            value = np.maximum(value, 0.0).reshape(len(value), -1, len(_NODES)) @ _NODE_WEIGHTS - rate * seconds
        return value[:, 0]


class Outlook:
    """What a ladder says of the future.

    Args:
        ladder: with a reference point, so that references have been on every rung; somebody is at the lowest.
    """

    def __init__(self, ladder: Ladder) -> None:
        assert ladder.reference_point is not None, "gains are measured from the reference point"
        self._ladder, self._reference = ladder, ladder.reference_point
        self._steps = learn_steps(ladder.qualities(), ladder.forecasts)
        costs = ladder.costs
        self._costs = [costs.rung(rung) for rung in range(len(ladder.rungs))]
        self._costs[-1] += costs.confirmation
        top = [*ladder.arrived[-1].values(), *ladder.references[-1].values()]
        self._noise = math.fsum(seen.sd**2 for seen in top) / len(top)
        self._reached = dict(ladder.complete) | self._expected()
        self._front = self._front_without(None)

    def options(self, trials: Sequence[int], rung: int) -> Options:
        """What it may lead to that trials climb from `rung`, as far as was known there; at least one trial."""
        return Options(np.array([self._gains(trial, rung) for trial in trials]), self._costs[rung + 1 :])

    def _gains(self, trial: int, rung: int) -> Array:
        arrival, forecast = self._ladder.arrived[rung][trial], self._ladder.forecasts.get(trial)
        front = self._front if trial not in self._front else self._front_without(trial)
        quality = np.array([arrival.coordinates[0]])
        for step in self._steps[rung:-1]:
            mean, sd = step.predict(quality, forecast)
            quality = (mean[:, None] + sd[:, None] * _NODES).ravel()
        room = slices(arrival.coordinates[1:], np.array(list(front.values())), self._reference)
        if rung == self._ladder.top:
            return room.gain(quality)
        mean, sd = self._steps[-1].predict(quality, forecast)
        true = np.sqrt(np.maximum(sd**2 - self._noise, 0.01 * sd**2))
        return room.expected(mean, true)

    def rate(self) -> float:
        """Hypervolume per second at which one more candidate is worth what it costs."""
        options = self.options(list(self._ladder.arrived[0])[-_RECENT:], 0)
        entry = self._ladder.costs.arrival
        low, high = 0.0, float(options.worth(0.0).mean()) / max(entry, 1e-9)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            surplus = float(np.maximum(options.worth(middle), 0.0).mean()) - middle * entry
            low, high = (middle, high) if surplus > 0 else (low, middle)
        return high

    def mean_rate(self) -> float:
        """Hypervolume per second of candidates that all go to the top."""
        gains = [self._gains(trial, 0)[0] for trial in list(self._ladder.arrived[0])[-_RECENT:]]
        return float(np.mean(gains)) / (self._ladder.costs.arrival + self._ladder.costs.confirmation)

    def _front_without(self, trial: int | None) -> dict[int, tuple[float, ...]]:
        points = {other: point for other, point in self._reached.items() if other != trial}
        best = front_mask(list(points.values()))
        return {other: point for (other, point), kept in zip(points.items(), best, strict=True) if kept}

    def _expected(self) -> dict[int, tuple[float, ...]]:
        """Those that were promoted count as if they had reached what is expected of them."""
        found = {}
        for trial, rung in self._ladder.on_way.items():
            if rung > 0 and (arrival := self._latest(trial, rung)) is not None:
                quality = np.array([arrival[1].coordinates[0]])
                for step in self._steps[arrival[0] :]:
                    quality, _ = step.predict(quality, self._ladder.forecasts.get(trial))
                found[trial] = (float(quality[0]), *arrival[1].coordinates[1:])
        return found

    def _latest(self, trial: int, rung: int) -> tuple[int, Arrival] | None:
        for below in range(rung, -1, -1):
            if trial in self._ladder.arrived[below]:
                return below, self._ladder.arrived[below][trial]
        return None


def earned(ladder: Ladder) -> float:
    """Hypervolume that a second is worth; needs the reference point, and somebody at the lowest rung.

    A ladder of one rung promotes nobody: there it is what a candidate that came last would gain at the top, a second.
    """
    outlook = Outlook(ladder)
    return outlook.rate() if ladder.top else outlook.mean_rate()


def _highest(ladder: Ladder) -> int:
    """The highest rung that somebody waits at."""
    return max(rung for rung in range(ladder.top) if ladder.waiting(rung))


def _why(worth: float, rate: float) -> str:
    more = "more" if worth > 0 else "less"
    return (
        f"expected to gain {abs(worth):.2g} of hypervolume {more} than its seconds do elsewhere, at {rate:.2g} a second"
    )
