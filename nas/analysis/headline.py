"""What a study found, in sentences: what won, by how much, and how sure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from pydantic import BaseModel, Field

from nas.analysis.snapshot import StudySnapshot
from nas.core.layout import Layout
from nas.core.metrics import METRICS
from nas.core.published import MODELS
from nas.core.scoring import PUBLISHED, Axis
from nas.core.stats import Z95

_MOST_SURE = 0.99
"""Chances above it are shown as more than it: normal errors say nothing about the tails."""


class Headline(BaseModel):
    """The result of a study so far."""

    text: str
    front: int = Field(description="trials on the front")
    better: int = Field(description="those of them that are better than the reference somewhere and worse nowhere")
    best: int | None = Field(description="of these, the trial that adds most hypervolume; null if there is none")
    reference: str | None = Field(description="the reference that they are compared with")
    chance: float | None = Field(description="that `best` is better in all that the text says")


@dataclass(frozen=True)
class _Difference:
    """One objective of a trial against the reference's.

    Args:
        name: of the objective.
        gain: reference - trial, in coordinates, which are minimised.
        sd: standard deviation of `gain`.
        text: the difference in words.
    """

    name: str
    gain: float
    sd: float
    text: str

    @property
    def better(self) -> bool:
        return self.gain > Z95 * self.sd

    @property
    def worse(self) -> bool:
        return self.gain < -Z95 * self.sd

    @property
    def chance(self) -> float:
        """Chance that the trial is better."""
        if not self.sd:
            return float(self.gain > 0)
        return NormalDist().cdf(self.gain / self.sd)


def headline(study: StudySnapshot) -> Headline | None:
    """Returns the result of a study so far; None before the references are measured."""
    if study.corner is None:
        return None
    front = [row for row in study.front if row.on]
    record = study.record.references.get(PUBLISHED)
    theirs = [axis for axis in record.axes if axis] if record else []
    reference = _name(record.layout) if record else None
    if not front:
        complete = study.states().get("complete", 0)
        text = (
            f"Nothing is on the front yet: {complete} trials are complete" if complete else "No trial is complete yet"
        )
        return Headline(text=f"{text}.", front=0, better=0, best=None, reference=reference, chance=None)
    layouts = f"{len(front)} layout{'s are' if len(front) > 1 else ' is'} on the front"
    if reference is None or len(theirs) < len(study.space.objectives):
        return Headline(text=f"{layouts}.", front=len(front), better=0, best=None, reference=None, chance=None)
    better: dict[int, list[_Difference]] = {}
    for row in front:
        found = _differences(study, study.counted[row.trial], theirs)
        if any(each.better for each in found) and not any(each.worse for each in found):
            better[row.trial] = found
    if not better:
        text = f"{layouts}; none is better than {reference} without being worse somewhere, as far as the noise tells."
        return Headline(text=text, front=len(front), better=0, best=None, reference=reference, chance=None)
    best, differences = next(iter(better.items()))  # the front is sorted by contribution
    claims = [each for each in differences if each.better]
    equal = [each.name for each in differences if not each.better]
    chance = math.prod(each.chance for each in claims)
    said = ", ".join(each.text for each in claims)
    alike = f", {' and '.join(equal)} equal within the noise" if equal else ""
    sure = f"more than {_MOST_SURE:.0%}" if chance > _MOST_SURE else f"{chance:.0%}"
    beat = f"{len(better)} of {layouts.replace(' are on', ' on').replace(' is on', ' on')} beat {reference}"
    return Headline(
        text=f"{beat}. Best: trial {best}, {said}{alike} (sure to {sure}).",
        front=len(front), better=len(better), best=best, reference=reference, chance=chance,
    )  # fmt: skip


def _name(layout: Layout) -> str:
    """Returns the name under which a reference layout was published, else what spaces call it."""
    known = {Layout.parse(text).id: name for name, text in MODELS.items()}
    return known.get(layout.id, f"the {PUBLISHED} reference")


def _differences(study: StudySnapshot, own: Sequence[Axis], theirs: Sequence[Axis]) -> list[_Difference]:
    return [
        _Difference(
            name=objective.name,
            gain=other.coordinate - axis.coordinate,
            sd=math.hypot(axis.sd, other.sd),
            text=_in_words(objective.name, objective.metric, axis, other),
        )
        for objective, axis, other in zip(study.space.objectives, own, theirs, strict=True)
    ]


def _in_words(name: str, metric: str, own: Axis, other: Axis) -> str:
    """Returns the change relative to the reference; of quality, whose reference is 1, in its own unit."""
    if METRICS[metric].transform != "log":
        return f"{name} {own.value:.2f} instead of {other.value:.2f}"
    change = own.value / other.value - 1
    return f"{name} {abs(change):.0%} {'lower' if change < 0 else 'higher'}"
