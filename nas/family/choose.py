"""Which of a size's candidates becomes the member: the one that alone keeps most of the front's hypervolume."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nas.core.errors import CandidateFailed
from nas.core.family import Tried
from nas.core.hypervolume import hypervolume
from nas.core.scoring import Axis
from nas.core.space import SearchSpace
from nas.family.figures import measured_of
from nas.family.scale import Scaled
from nas.family.terms import Measurements


@dataclass(frozen=True)
class Judged:
    """A candidate with what became of it.

    Args:
        scaled: the candidate.
        axes: objective -> its coordinate; none: it failed.
        taken: its measurements.
        failure: why it has no axes.
    """

    scaled: Scaled
    axes: Mapping[str, Axis]
    taken: Measurements = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True)
class Choice:
    """The chosen one of several candidates.

    Args:
        index: of the chosen one.
        alone: hypervolume that each keeps alone.
        front: hypervolume of all.
        names: objectives that counted.
        verdicts: on each, in words.
    """

    index: int
    alone: tuple[float, ...]
    front: float
    names: tuple[str, ...]
    verdicts: tuple[str, ...]

    def reason(self) -> str:
        """Why this one."""
        told = f"of {len(self.alone)} candidates" if len(self.alone) > 1 else "the only candidate"
        if self.front == 0:
            return f"{told}: none is inside the corner on {', '.join(self.names)}; the nearest to the pattern is taken"
        share = self.alone[self.index] / self.front
        return f"{told}: alone it keeps {share:.0%} of the front's hypervolume on {', '.join(self.names)}"


def choose(judged: Sequence[Judged], limits: Mapping[str, float]) -> Choice:
    """The candidate of greatest hypervolume alone: the best subset of size one of the front.

    A contribution, which ranks a study's front, would count two good candidates that are much alike as little.

    Args:
        judged: nearest to the pattern first, which is who wins a tie.
        limits: objective -> its coordinate in the corner.

    Raises:
        CandidateFailed: none of them could be measured.
    """
    ran = [each for each in judged if each.axes]
    if not ran:
        raise CandidateFailed("crash", f"no candidate could be measured: {judged[0].failure}")
    names = tuple(name for name in limits if all(name in each.axes for each in ran))
    corner = [limits[name] for name in names]

    def volume(*some: Judged) -> float:
        points = [[each.axes[name].coordinate for name in names] for each in some if each.axes]
        return hypervolume(points, corner) if points and names else 0.0

    alone, front = tuple(volume(each) for each in judged), volume(*ran)
    index = max(range(len(judged)), key=lambda i: (bool(judged[i].axes), alone[i], -i))
    verdicts = tuple(_verdict(each, alone[i], front, limits, names) for i, each in enumerate(judged))
    return Choice(index, alone, front, names, verdicts)


def tried_of(judged: Sequence[Judged], choice: Choice, space: SearchSpace) -> tuple[Tried, ...]:
    """The record of a size's search."""
    return tuple(
        Tried(
            layout=each.scaled.layout.format(),
            parameters=each.scaled.layout.params.total,
            active=each.scaled.layout.params.active,
            chosen=i == choice.index,
            verdict=choice.verdicts[i],
            objectives={name: axis.value for name, axis in each.axes.items()},
            measured=measured_of(each.taken, space),
        )
        for i, each in enumerate(judged)
    )


def _verdict(
    each: Judged, alone: float, front: float, limits: Mapping[str, float], names: Sequence[str]
) -> str:  # fmt: skip
    if each.failure:
        return f"failed: {each.failure}"
    outside = [name for name in names if each.axes[name].coordinate >= limits[name]]
    if outside:
        told = ", ".join(f"{name} {_ratio(name, each.axes[name])}" for name in outside)
        return f"outside the corner: {told}"
    return f"alone keeps {alone / front:.0%} of the front's hypervolume"


def _ratio(name: str, axis: Axis) -> str:
    return f"{axis.value:.3g}" if name == "quality" else f"{math.exp(axis.coordinate):.2f}x the nearest candidate's"
