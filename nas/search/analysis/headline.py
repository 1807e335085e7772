"""What a study found, in sentences: what won, by how much, and how sure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from pydantic import BaseModel, Field

from nas.core.layout import Layout
from nas.core.metrics import METRICS
from nas.core.published import MODELS
from nas.core.scoring import PUBLISHED, Axis
from nas.core.stats import Z95
from nas.core.units import show_number, show_share
from nas.search.analysis.reliability import quality_reliability
from nas.search.analysis.snapshot import StudySnapshot

_MOST_SURE = 0.99
"""Chances above it are shown as more than it: normal errors say nothing about the tails."""
_RELIABLE = 0.5
"""Reliability below which more than half of the variance between candidates is noise."""


class Headline(BaseModel):
    """The result of a study so far."""

    text: str
    front: int = Field(description="trials on the front")
    better: int = Field(description="those of them that are better than the reference somewhere and worse nowhere")
    best: int | None = Field(description="of these, the trial that adds most hypervolume; null if there is none")
    named: int | None = Field(None, description="the trial that the text names; null if it names none")
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
    if study.reference_point is None:
        return None
    front = [row for row in study.front if row.on]
    record = study.record.references.get(PUBLISHED)
    theirs = [axis for axis in record.axes if axis] if record else []
    reference = _name(record.layout) if record else None
    if not front:
        return Headline(text=_without_front(study), front=0, better=0, best=None, reference=reference, chance=None)
    layouts = f"{len(front)} layout{'s are' if len(front) > 1 else ' is'} on the front"
    if reference is None or len(theirs) < len(study.space.objectives):
        return Headline(text=f"{layouts}.", front=len(front), better=0, best=None, reference=None, chance=None)
    # The front is sorted by contribution.
    differences = {row.trial: _differences(study, study.counted[row.trial], theirs) for row in front}
    better = [
        trial
        for trial, of_trial in differences.items()
        if any(difference.better for difference in of_trial) and not any(difference.worse for difference in of_trial)
    ]
    if not better:
        first = next(iter(differences))
        said, _ = _compared(differences[first])
        text = (
            f"{layouts}; none is better than {reference} without being worse somewhere, as far as the noise tells."
            f" The one that adds most hypervolume: trial {first}, {said}.{_reliability(study)}"
        )
        return Headline(text=text, front=len(front), better=0, best=None, named=first, reference=reference, chance=None)
    said, chance = _compared(differences[better[0]])
    layouts = f"{len(better)} of {len(front)} layout{'s' if len(front) > 1 else ''} on the front"
    text = (
        f"{layouts} {'are' if len(better) > 1 else 'is'} better than {reference} in something and, within the noise,"
        f" worse in nothing. The one that adds most hypervolume: trial {better[0]}, {said}.{_reliability(study)}"
    )
    return Headline(
        text=text,
        front=len(front),
        better=len(better),
        best=better[0],
        named=better[0],
        reference=reference,
        chance=chance,
    )


def _without_front(study: StudySnapshot) -> str:
    """Returns why nothing is on the front: what became of the trials."""
    states = study.states()
    ended = {
        "with a broken budget": states.get("infeasible", 0),
        "stopped early": states.get("stopped", 0),
        "failed": states.get("failed", 0),
    }
    yet = "" if study.over else " yet"
    if not any(ended.values()):
        return f"Nothing has won{yet}: no trial has ended."
    became = "; ".join(f"{count} {what}" for what, count in ended.items() if count)
    return f"Nothing has won{yet}. Of {sum(states.values())} trials: {became}."


def _compared(differences: Sequence[_Difference]) -> tuple[str, float]:
    """Returns a trial's differences to the reference in words, and the chance that all that are stated are real."""
    real = sorted(
        (difference for difference in differences if difference.better or difference.worse),
        key=lambda difference: difference.worse,
    )
    equal = [difference.name for difference in differences if not (difference.better or difference.worse)]
    alike = (
        [" and ".join(filter(None, [", ".join(equal[:-1]), *equal[-1:]])) + " equal within the noise"] if equal else []
    )
    said = ", ".join([*(difference.text for difference in real), *alike])
    if not real:
        return said, 1.0
    chance = math.prod(max(difference.chance, 1 - difference.chance) for difference in real)
    sure = f"more than {show_share(_MOST_SURE)}" if chance > _MOST_SURE else show_share(chance)
    return f"{said} (sure to {sure})", chance


def _reliability(study: StudySnapshot) -> str:
    """Returns a sentence on how far the qualities of the candidates differ by more than noise; '' if not known."""
    reliability = quality_reliability(study)
    if reliability is None or reliability.overall is None:
        return ""
    if reliability.overall >= _RELIABLE:
        return f" Reliability of quality: {reliability.overall:.2f}."
    return f" Differences in quality between the layouts are mostly noise (reliability {reliability.overall:.2f})."


def _name(layout: Layout) -> str:
    """Returns the name under which a reference layout was published, else what spaces call it."""
    names = {Layout.parse(text).id: name for name, text in MODELS.items()}
    return names.get(layout.id, f"the {PUBLISHED} reference")


def _differences(study: StudySnapshot, axes: Sequence[Axis], theirs: Sequence[Axis]) -> list[_Difference]:
    return [
        _Difference(
            name=objective.name,
            gain=other.coordinate - axis.coordinate,
            sd=math.hypot(axis.sd, other.sd),
            text=_in_words(objective.name, objective.metric, axis, other),
        )
        for objective, axis, other in zip(study.space.objectives, axes, theirs, strict=True)
    ]


def _in_words(name: str, metric: str, axis: Axis, other: Axis) -> str:
    """Returns the change relative to the reference; of quality, whose reference is 1, in its own unit."""
    if METRICS[metric].transform != "log":
        half = Z95 * math.hypot(axis.sd, other.sd)
        mine, theirs = (show_number(value, value - half, value + half) for value in (axis.value, other.value))
        return f"{name} {mine} instead of {theirs}"
    change = axis.value / other.value - 1
    return f"{name} {show_share(abs(change))} {'lower' if change < 0 else 'higher'}"
