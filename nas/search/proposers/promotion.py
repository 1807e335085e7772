"""Decides which trials are promoted from one rung of the quality ladder to the next.

A `Ladder` holds what is known of a study's trials and asks a policy: `Shares` promotes the best share of each rung
(asynchronous successive halving), `ByValue` promotes whatever is expected to gain more hypervolume than its seconds
would gain elsewhere. Needs neither a database nor Ray; `nas.search.study.promotion` drives it in a running study.

`ByValue` treats each rung as an option on the next: after it, a trial may still be stopped. So the value of a promotion
is computed from the top down (backward induction over the qualities that the next rung may show), with every second
charged at the rate that the study earns otherwise. That rate is the one at which a new candidate is worth exactly what
it costs to bring it to the lowest rung (renewal reward; Charnov 1976, "Optimal foraging, the marginal value theorem").
It is computed from the latest candidates, so it falls as the front fills and rises with the price of a stage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nas.core.pareto import front_mask, hypervolume, ranks
from nas.core.quality_config import Rung

_SLOPE_ROWS = 2.0
"""Observations that each prior slope is worth."""
_MEAN_ROWS = 0.01
"""Observations that 'no shift between rungs' is worth: rungs evaluate different things."""
_FORECAST_SHARE = 0.5
"""Prior share of the way to the forecast."""
_PRIOR_DOF = 4.0
_PRIOR_SHARE = 0.5
"""Prior deviation of a step, as a share of the spread of candidates at its lower rung."""

_RECENT = 24
"""Latest candidates, from which the worth of a new one is estimated."""
_PATIENCE = 6
"""Later results at its rung that a trial waits for: what is known of rungs and rates changes."""
_NODES, _NODE_WEIGHTS = np.polynomial.hermite_e.hermegauss(9)
_NODE_WEIGHTS = _NODE_WEIGHTS / _NODE_WEIGHTS.sum()
_BISECTIONS = 40

Array = NDArray[np.float64]
Verdict = Literal["promote", "stop"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """The result of a trial that finished a rung.

    Args:
        coordinates: all minimised coordinates; where quality is one, it comes first.
        sd: standard deviation of the quality over seeds.
    """

    coordinates: tuple[float, ...]
    sd: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """The verdict on a trial that finished `rung`, and its reason."""

    trial: int
    rung: int
    verdict: Verdict
    why: str = field(default="", compare=False)


class Policy(Protocol):
    """Decides promotions. It keeps no state but what it can compute from the ladder."""

    def decide(self, ladder: Ladder, rung: int, last_call: bool) -> Decision | None:
        """Returns the next decision on a trial that waits at `rung`; None where all of them shall keep waiting.

        With `last_call`, no further trial will reach the rung, so every waiting one gets a verdict.
        """


@dataclass
class Ladder:
    """The trials of a study, by rung.

    Args:
        rungs: from the space; the last one promotes nothing.
        policy: decides promotions.
    """

    rungs: Sequence[Rung]
    policy: Policy
    closed: bool = False
    """Set once no more candidates will be proposed."""
    reference_point: tuple[float, ...] | None = None
    """The worst corner, in the order of `Arrival.coordinates`; None until it is fixed."""
    costs: StageCosts = field(init=False)
    on_way: dict[int, int] = field(default_factory=dict)
    """Unfinished trials -> the rung they will finish next."""
    arrived: list[dict[int, Arrival]] = field(init=False)
    """For every rung, trial -> its result, in the order they came."""
    references: list[dict[int, Arrival]] = field(init=False)
    """The same of the reference layouts, which are always promoted and compete with no trial."""
    complete: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """Trial -> coordinates as confirmed."""
    forecasts: dict[int, float] = field(default_factory=dict)
    """Trial -> the quality that was forecast when it was proposed."""
    decided: dict[tuple[int, int], Verdict] = field(default_factory=dict)
    """(trial, rung) -> verdict."""
    revision: int = 0
    """Grows with everything reported and promoted, so that a policy can cache what it computes."""

    def __post_init__(self) -> None:
        self.costs = StageCosts(self.rungs)
        self.arrived = [{} for _ in self.rungs]
        self.references = [{} for _ in self.rungs]

    @property
    def top(self) -> int:
        """Index of the top rung."""
        return len(self.rungs) - 1

    def enter(self, trial: int, forecast: float | None = None) -> None:
        """Adds a candidate, with the (minimised) quality that its proposer forecast, if any."""
        self.revision += 1
        self.on_way[trial] = 0
        if forecast is not None:
            self.forecasts[trial] = forecast

    def leave(self, trial: int) -> None:
        """Removes a candidate that ended, complete or not."""
        self.revision += 1
        self.on_way.pop(trial, None)

    def finish(self, trial: int, rung: int, arrival: Arrival, *, reference: bool = False) -> None:
        """Records that a candidate, or a reference layout, finished a rung."""
        self.revision += 1
        if reference:
            self.references[rung][trial] = arrival
        else:
            self.arrived[rung][trial] = arrival
            if rung < self.top:
                self.on_way.pop(trial, None)

    def recall(self, trial: int, rung: int, verdict: Verdict) -> None:
        """Takes over a decision of an earlier process."""
        self._record(Decision(trial, rung, verdict))

    def waiting(self, rung: int) -> list[int]:
        """Returns the trials that finished `rung` and have no verdict, in the order they came."""
        return [trial for trial in self.arrived[rung] if (trial, rung) not in self.decided]

    def qualities(self) -> list[dict[int, float]]:
        """Returns for every rung, trial -> quality, references included."""
        both = zip(self.arrived, self.references, strict=True)
        return [{trial: seen.coordinates[0] for trial, seen in {**own, **ref}.items()} for own, ref in both]

    def noise(self, rung: int) -> float:
        """Returns the standard deviation of quality at `rung` as a prediction of quality at the top.

        A shift that all trials share does not count. It is more than the spread over seeds: a cheap rung errs by
        layout, and more seeds would not remove that.
        """
        seen = self.qualities()[rung:]
        return math.sqrt(math.fsum(step.variance for step in learn_steps(seen, {}))) if all(seen[:-1]) else 0.0

    def decisions(self) -> list[Decision]:
        """Makes and returns all decisions that are possible now, lowest rung first."""
        made: list[Decision] = []
        for rung in range(self.top):
            last_call = self.closed and not any(at <= rung for at in self.on_way.values())
            while self.waiting(rung) and (decision := self.policy.decide(self, rung, last_call)):
                self._record(decision)
                made.append(decision)
        return made

    def _record(self, decision: Decision) -> None:
        self.decided[decision.trial, decision.rung] = decision.verdict
        if decision.verdict == "promote":
            self.revision += 1
            self.on_way[decision.trial] = decision.rung + 1


class StageCosts:
    """Seconds of a trial's stages, device and training together: on one host they are spent one after the other.

    Args:
        rungs: of the ladder; before a rung has run, its seconds are guessed from its training steps.
    """

    def __init__(self, rungs: Sequence[Rung]) -> None:
        self._steps = [_new_steps(rungs, index) for index in range(len(rungs))]
        self._rungs: list[dict[int, float]] = [{} for _ in rungs]
        self._entries: dict[int, float] = {}
        self._confirmations: dict[int, float] = {}

    def enter(self, trial: int, seconds: float) -> None:
        """Records the export and the device gate, whatever the gate's verdict."""
        self._entries[trial] = seconds

    def train(self, trial: int, rung: int, seconds: float) -> None:
        """Records what a rung took in addition to the one before it."""
        self._rungs[rung][trial] = seconds

    def confirm(self, trial: int, seconds: float) -> None:
        """Records the equivalence gate and the measurement of the top rung."""
        self._confirmations[trial] = seconds

    def rung(self, rung: int) -> float:
        """Returns the mean seconds of a rung."""
        if self._rungs[rung]:
            return _mean(self._rungs[rung])
        seen = [index for index, spent in enumerate(self._rungs) if spent]
        if not seen:
            return float(self._steps[rung])
        pace = math.fsum(_mean(self._rungs[i]) for i in seen) / max(1, sum(self._steps[i] for i in seen))
        return pace * self._steps[rung]

    @property
    def confirmation(self) -> float:
        """Mean seconds of a confirmation; before the first, those of an entry."""
        return _mean(self._confirmations or self._entries)

    @property
    def arrival(self) -> float:
        """Seconds until one more candidate finishes the lowest rung, those spent on refused ones included."""
        arrived = max(1, len(self._rungs[0].keys() & self._entries.keys()))
        return math.fsum(self._entries.values()) / arrived + self.rung(0)


class Shares:
    """Promotes the best `keep` of each rung."""

    def decide(self, ladder: Ladder, rung: int, last_call: bool) -> Decision | None:
        """See `Policy.decide`."""
        arrived = ladder.arrived[rung]
        trials = list(arrived)
        order = promotion_order([arrived[trial].coordinates for trial in trials])
        for trial in [trials[i] for i in order][: _places(ladder, rung, last_call)]:
            if (trial, rung) not in ladder.decided:
                return Decision(trial, rung, "promote")
        if last_call:
            return Decision(ladder.waiting(rung)[0], rung, "stop", "others of the rung were better")
        return None


class ByValue:
    """Promotes trials whose expected gain exceeds the price of their seconds.

    Until the reference point is fixed, `Shares` decides.
    """

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
        highest = max(each for each in range(ladder.top) if ladder.waiting(each))
        last_chance = last_call and not ladder.complete and not ladder.on_way and rung == highest
        if worth[best] > 0 or last_chance:
            return Decision(waiting[best], rung, "promote", _why(worth[best], rate))
        arrived = list(ladder.arrived[rung])
        for trial, gain in zip(waiting, worth, strict=True):
            if last_call or len(arrived) - arrived.index(trial) > _PATIENCE:
                return Decision(trial, rung, "stop", _why(gain, rate))
        return None

    def _outlook(self, ladder: Ladder) -> tuple[Outlook, float]:
        """Returns the outlook of the ladder and its rate; both stay the same while trials are only stopped."""
        if self._last is None or self._last[0] != ladder.revision:
            outlook = Outlook(ladder)
            self._last = ladder.revision, outlook, outlook.rate()
        return self._last[1:]


@dataclass(frozen=True)
class Step:
    """Predicts quality at one rung from quality at the rung below and a forecast, by a linear model.

    Args:
        centre: mean of the lower rung's qualities.
        shift: mean of forecasts minus those qualities: rungs and forecasts have scales of their own.
        mean: [3] level, slope, and share of the way to the forecast.
        spread: [3, 3] their covariance, as multiples of `variance`.
        variance: of one candidate around the prediction; with few observations, wider by their uncertainty.
    """

    centre: float
    shift: float
    mean: Array
    spread: Array
    variance: float

    def predict(self, quality: Array, forecast: float | None) -> tuple[Array, Array]:
        """Returns [N] means and standard deviations at the upper rung, given [N] qualities at the lower."""
        away = np.zeros_like(quality) if forecast is None else forecast - quality - self.shift
        rows = np.stack([np.ones_like(quality), quality - self.centre, away], axis=1)
        leverage = np.einsum("ni,ij,nj->n", rows, self.spread, rows)
        return rows @ self.mean, np.sqrt(self.variance * (1.0 + leverage))


@dataclass(frozen=True)
class GainCurve:
    """Hypervolume that a candidate adds, as a function of its quality: sum_k weights[k] * max(0, levels[k] - quality).

    Args:
        levels: [K] qualities at which the slope changes.
        weights: [K] by how much, in volume of the other coordinates.
    """

    levels: Array
    weights: Array

    def gain(self, quality: Array) -> Array:
        """Returns [N] hypervolume that [N] minimised qualities add."""
        return np.asarray(np.maximum(self.levels - quality[:, None], 0.0) @ self.weights)

    def expected(self, mean: Array, sd: Array) -> Array:
        """Returns [N] expected gains of normally distributed qualities with standard deviations above 0."""
        from scipy.special import ndtr  # type: ignore[import-untyped]

        away = (self.levels - mean[:, None]) / sd[:, None]
        depth = sd[:, None] * (away * ndtr(away) + np.exp(-0.5 * away**2) / np.sqrt(2 * np.pi))
        return np.asarray(depth @ self.weights)


@dataclass(frozen=True)
class Options:
    """Possible outcomes of promoting several candidates from a rung.

    Args:
        gains: [N, 9 ** n] expected gains in hypervolume at the top, by what the n rungs between may show.
        costs: seconds of the next rung first, the top with its confirmation last: n + 1 of them.
    """

    gains: Array
    costs: Sequence[float]

    def worth(self, rate: float) -> Array:
        """Returns [N] expected gains minus all seconds at `rate`; later rungs are run only where they pay."""
        value = self.gains - rate * self.costs[-1]
        for seconds in reversed(self.costs[:-1]):
            value = np.maximum(value, 0.0).reshape(len(value), -1, len(_NODES)) @ _NODE_WEIGHTS - rate * seconds
        return value[:, 0]


class Outlook:
    """Predicts from a ladder what promotions gain and cost.

    Args:
        ladder: with a reference point, so that references have finished every rung; the lowest has a result.
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
        """Returns the options of promoting trials from `rung`, by what was known there; at least one trial."""
        return Options(np.array([self._gains(trial, rung) for trial in trials]), self._costs[rung + 1 :])

    def rate(self) -> float:
        """Returns the hypervolume per second at which one more candidate is worth what it costs."""
        options = self.options(list(self._ladder.arrived[0])[-_RECENT:], 0)
        entry = self._ladder.costs.arrival
        low, high = 0.0, float(options.worth(0.0).mean()) / max(entry, 1e-9)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            surplus = float(np.maximum(options.worth(middle), 0.0).mean()) - middle * entry
            low, high = (middle, high) if surplus > 0 else (low, middle)
        return high

    def _gains(self, trial: int, rung: int) -> Array:
        arrival, forecast = self._ladder.arrived[rung][trial], self._ladder.forecasts.get(trial)
        front = self._front if trial not in self._front else self._front_without(trial)
        quality = np.array([arrival.coordinates[0]])
        for step in self._steps[rung:-1]:
            mean, sd = step.predict(quality, forecast)
            quality = (mean[:, None] + sd[:, None] * _NODES).ravel()
        curve = gain_curve(arrival.coordinates[1:], np.array(list(front.values())), self._reference)
        if rung == self._ladder.top:
            return curve.gain(quality)
        mean, sd = self._steps[-1].predict(quality, forecast)
        true = np.sqrt(np.maximum(sd**2 - self._noise, 0.01 * sd**2))
        return curve.expected(mean, true)

    def _front_without(self, trial: int | None) -> dict[int, tuple[float, ...]]:
        points = {other: point for other, point in self._reached.items() if other != trial}
        best = front_mask(list(points.values()))
        return {other: point for (other, point), kept in zip(points.items(), best, strict=True) if kept}

    def _expected(self) -> dict[int, tuple[float, ...]]:
        """Returns the coordinates that promoted trials are expected to reach."""
        found = {}
        for trial, rung in self._ladder.on_way.items():
            if rung > 0 and (latest := self._latest(trial, rung)) is not None:
                below, arrival = latest
                quality = np.array([arrival.coordinates[0]])
                for step in self._steps[below:]:
                    quality, _ = step.predict(quality, self._ladder.forecasts.get(trial))
                found[trial] = (float(quality[0]), *arrival.coordinates[1:])
        return found

    def _latest(self, trial: int, rung: int) -> tuple[int, Arrival] | None:
        for below in range(rung, -1, -1):
            if trial in self._ladder.arrived[below]:
                return below, self._ladder.arrived[below][trial]
        return None


def promotion_order(points: Sequence[Sequence[float]]) -> list[int]:
    """Returns indices in order of promotion: by non-dominated rank, then by the first coordinate (minus quality)."""
    if not points:
        return []
    rank = ranks(np.asarray(points, dtype=float))
    return sorted(range(len(points)), key=lambda i: (int(rank[i]), points[i][0], i))


def learn_step(below: Mapping[int, float], above: Mapping[int, float], forecasts: Mapping[int, float]) -> Step:
    """Fits the step between two rungs.

    Args:
        below: trial -> quality at the lower rung; at least one.
        above: the same at the upper rung.
        forecasts: trial -> forecast quality, as far as there are any.
    """
    known = sorted(below)
    centre, width = _moments([below[trial] for trial in known])
    shift, reach = _moments([forecasts[trial] - below[trial] for trial in known if trial in forecasts])
    both = sorted(below.keys() & above.keys())
    x, y = np.array([below[trial] for trial in both]), np.array([above[trial] for trial in both])
    away = np.array([forecasts[trial] - below[trial] - shift if trial in forecasts else 0.0 for trial in both])
    rows = np.stack([np.ones_like(x), x - centre, away], axis=1)
    prior = np.diag([_MEAN_ROWS if both else 1.0, _SLOPE_ROWS * width**2, _SLOPE_ROWS * reach**2])
    start = np.array([centre, 1.0, _FORECAST_SHARE])
    spread = np.linalg.inv(prior + rows.T @ rows)
    mean = spread @ (prior @ start + rows.T @ y)
    residual, moved = y - rows @ mean, mean - start
    dof = _PRIOR_DOF + len(both)
    squares = _PRIOR_DOF * (_PRIOR_SHARE * width) ** 2 + float(residual @ residual) + float(moved @ prior @ moved)
    return Step(centre, shift, mean, spread, squares / (dof - 2.0))


def learn_steps(seen: Sequence[Mapping[int, float]], forecasts: Mapping[int, float]) -> list[Step]:
    """Fits the step from each rung but the last to the next.

    Args:
        seen: for every rung, trial -> quality; at least one in each but the last.
        forecasts: trial -> forecast quality, as far as there are any.
    """
    return [learn_step(below, above, forecasts) for below, above in pairwise(seen)]


def gain_curve(others: Sequence[float], front: ArrayLike, reference: Sequence[float]) -> GainCurve:
    """Returns what a candidate adds to a front, by its quality; exact.

    For a quality t, the points of the front that are at least as good leave it the part of the box between `others`
    and the reference point that none of them reaches; hypervolume is the integral of that over t.

    Args:
        others: [M - 1] the candidate's coordinates but quality.
        front: [F, M] what is reached, quality first.
        reference: [M] the worst corner, quality first.
    """
    corner, own = np.asarray(reference[1:], dtype=np.float64), np.asarray(others, dtype=np.float64)
    points = np.asarray(front, dtype=np.float64).reshape(-1, len(reference))
    points = points[np.argsort(points[:, 0], kind="stable")]
    points = points[(points[:, 0] < reference[0]) & (points[:, 1:] < corner).all(axis=1)]
    box = hypervolume([own], corner)
    if box == 0.0:
        return GainCurve(np.zeros(1), np.zeros(1))
    shadows = np.maximum(points[:, 1:], own)
    left = [box, *(box - hypervolume(shadows[: count + 1], corner) for count in range(len(points)))]
    levels = np.append(points[:, 0], reference[0])
    return GainCurve(levels, np.append(-np.diff(left), left[-1]))


def _places(ladder: Ladder, rung: int, last_call: bool) -> int:
    count, keep = len(ladder.arrived[rung]), ladder.rungs[rung].keep
    if last_call or keep is None:
        return ladder.rungs[rung].promoted(count)
    return 0 if isinstance(keep, int) else math.floor(keep * count)


def _why(worth: float, rate: float) -> str:
    more = "more" if worth > 0 else "less"
    return (
        f"expected to gain {abs(worth):.2g} of hypervolume {more} than its seconds do elsewhere, at {rate:.2g} a second"
    )


def _new_steps(rungs: Sequence[Rung], index: int) -> int:
    """Returns the optimiser steps that a rung adds: a language model continues from the rung before with its seed."""
    rung = rungs[index]
    before = {seed: below.lm_steps for below in rungs[:index] if below.lm_steps for seed in below.seeds}
    lm = sum(max(0, rung.lm_steps - before.get(seed, 0)) for seed in rung.seeds) if rung.lm_steps else 0
    tasks = sum(stage.steps * len(rung.task_seeds(name)) for name, stage in rung.tasks.items())
    return lm + tasks


def _mean(spent: Mapping[int, float]) -> float:
    return math.fsum(spent.values()) / len(spent) if spent else 0.0


def _moments(values: Sequence[float]) -> tuple[float, float]:
    """Returns mean and standard deviation; the deviation is above 0 even for no values."""
    if not values:
        return 0.0, 1e-6
    mean = math.fsum(values) / len(values)
    return mean, max(math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values)), 1e-6)
