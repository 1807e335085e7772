"""Chooses the member from a size's candidates: the one with the greatest hypervolume by itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nas.core.errors import CandidateFailed
from nas.core.family import ConsideredLayout
from nas.core.pareto import hypervolume
from nas.core.scoring import Axis
from nas.core.space import SearchSpace
from nas.train.scaling.candidates import ScaledLayout
from nas.train.scaling.measure import measured_of
from nas.train.scaling.source import Measurements


@dataclass(frozen=True)
class CandidateResult:
    """A candidate with its coordinates or its failure.

    Args:
        scaled: the candidate.
        axes: objective -> its coordinate; empty: it failed.
        measurements: on devices.
        failure: why it has no axes.
    """

    scaled: ScaledLayout
    axes: Mapping[str, Axis]
    measurements: Measurements = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True)
class Choice:
    """The chosen one of several candidates.

    Args:
        index: of the chosen one.
        alone: hypervolume of each by itself.
        front: hypervolume of all.
        names: objectives that counted.
        verdicts: on each, as a sentence.
    """

    index: int
    alone: tuple[float, ...]
    front: float
    names: tuple[str, ...]
    verdicts: tuple[str, ...]

    def reason(self) -> str:
        """Returns an explanation of the choice."""
        names = ", ".join(self.names)
        few = f"best of {len(self.alone)} candidates" if len(self.alone) > 1 else "the only candidate"
        if self.front == 0:
            few = f"the nearest to the pattern of {len(self.alone)}" if len(self.alone) > 1 else few
            return f"{few}: no candidate is better than the reference point on {names}"
        share = self.alone[self.index] / self.front
        return f"{few}: by itself it covers {share:.0%} of the front's hypervolume on {names}"


def choose(results: Sequence[CandidateResult], limits: Mapping[str, float]) -> Choice:
    """Chooses the candidate with the greatest hypervolume by itself: the best subset of size one of the front.

    A hypervolume contribution, which ranks a study's front, would give two good but similar candidates low ranks.

    Args:
        results: nearest to the pattern first; ties go to the first.
        limits: objective -> its coordinate in the reference point.

    Raises:
        CandidateFailed: none of them could be measured.
    """
    ran = [result for result in results if result.axes]
    if not ran:
        raise CandidateFailed("crash", f"no candidate could be measured: {results[0].failure}")
    names = tuple(name for name in limits if all(name in result.axes for result in ran))
    reference = [limits[name] for name in names]

    def volume(*subset: CandidateResult) -> float:
        points = [[result.axes[name].coordinate for name in names] for result in subset if result.axes]
        return hypervolume(points, reference) if points and names else 0.0

    alone, front = tuple(map(volume, results)), volume(*ran)
    index = max(range(len(results)), key=lambda i: (bool(results[i].axes), alone[i], -i))
    verdicts = tuple(_verdict(result, alone[i], front, limits, names) for i, result in enumerate(results))
    return Choice(index, alone, front, names, verdicts)


def tried_of(results: Sequence[CandidateResult], choice: Choice, space: SearchSpace) -> tuple[ConsideredLayout, ...]:
    """Returns the records of a size's candidates."""
    return tuple(
        ConsideredLayout(
            layout=result.scaled.layout.format(),
            parameters=result.scaled.layout.params.total,
            active=result.scaled.layout.params.active,
            chosen=i == choice.index,
            verdict=choice.verdicts[i],
            objectives={name: axis.value for name, axis in result.axes.items()},
            measured=measured_of(result.measurements, space),
        )
        for i, result in enumerate(results)
    )


def _verdict(
    result: CandidateResult, alone: float, front: float, limits: Mapping[str, float], names: Sequence[str]
) -> str:
    if result.failure:
        return f"failed: {result.failure}"
    outside = [name for name in names if result.axes[name].coordinate >= limits[name]]
    if outside:
        figures = ", ".join(f"{name} {_figure(result.axes[name])}" for name in outside)
        return f"worse than the reference point: {figures}"
    return f"by itself covers {alone / front:.0%} of the front's hypervolume"


def _figure(axis: Axis) -> str:
    """Returns a quality, whose coordinate is its negative, as it is, and others as ratios."""
    of_proxy = axis.coordinate == -axis.value
    return f"{axis.value:.3g}" if of_proxy else f"{math.exp(axis.coordinate):.2f}x the nearest candidate's"
