"""What a study found, in sentences: what won, by how much, and how sure.

Where the front was measured again, the sentence is of the second measurement alone (`nas.search.analysis.second`).
Otherwise it holds what is sure whichever of the layouts had won: bounds that hold for all that were proposed at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pydantic import BaseModel, Field

from nas.core.comparison import CONFIDENCE, Gain, better_of, gains, is_better, naming_order, tail
from nas.core.layout import Layout
from nas.core.metrics import METRICS, RECALL_METRIC
from nas.core.published import MODELS
from nas.core.scoring import PUBLISHED, Axis
from nas.core.space import Objective
from nas.core.units import show_number, show_range, show_share
from nas.search.analysis.reliability import quality_reliability
from nas.search.analysis.second import second_gains
from nas.search.analysis.snapshot import StudySnapshot
from nas.search.proxy.quality import QualityScale

_RELIABLE = 0.5
"""Reliability below which more than half of the variance between candidates is noise."""


class StatedGain(BaseModel):
    """A difference to the reference that a headline states: of a ratio its change, of quality the difference."""

    objective: str
    change: float | None = Field(description="below 0: the trial's is lower; null where only a bound is stated")
    low: float | None = Field(description="lower end of what is stated; null: none is")
    high: float | None


class Headline(BaseModel):
    """The result of a study so far."""

    text: str
    front: int = Field(description="trials on the front")
    better: int = Field(
        description="trials that are better than the reference somewhere and, within the noise, worse nowhere: any is"
        " called so by mistake in at most 5 % of studies"
    )
    best: int | None = Field(description="of these, the trial that the text names; null if it is none of them")
    named: int | None = Field(None, description="the trial that the text names; null if it names none")
    reference: str | None = Field(description="the reference that they are compared with")
    second: bool = Field(False, description="whether all is of a second measurement, which did not choose the trials")
    confidence: float | None = Field(None, description="chance that all `gains` are within their bounds")
    gains: list[StatedGain] = Field(default=[], description="of the named trial")


def headline(study: StudySnapshot) -> Headline | None:
    """Returns the result of a study so far; None before the references are measured."""
    if study.reference_point is None:
        return None
    front = len(study.curve.front)
    published = study.record.references.get(PUBLISHED)
    theirs = [axis for axis in published.axes if axis] if published else []
    reference = _name(published.layout) if published else None
    if not front:
        return Headline(text=_without_front(study), front=0, better=0, best=None, reference=reference)
    if reference is None or len(theirs) < len(study.space.objectives):
        return Headline(text=f"{_layouts(front)} on the front.", front=front, better=0, best=None, reference=None)
    result = _by_second(study, theirs, reference) or _by_first(study, theirs, reference)
    return result.model_copy(update={"text": result.text + _reliability(study)})


def _by_second(study: StudySnapshot, theirs: Sequence[Axis], reference: str) -> Headline | None:
    """Returns the headline by the second measurement; None without one.

    Half of the chance of a mistake is the named trial's, half is that of all others together.
    """
    measured = second_gains(study.record)
    if not measured:
        return None
    named, of_named = next(iter(measured.items()))
    error = tail(len(theirs))
    first = gains(study.counted[named], theirs) if named in study.counted else []
    claims = [gain or Gain(0.0, None) for gain in of_named]
    stated, words = list[StatedGain](), list[str]()
    for place, (objective, gain) in enumerate(zip(study.space.objectives, of_named, strict=True)):
        if gain is not None:
            row = _stated(objective, gain, error)
            stated.append(row)
            words.append(_interval_in_words(objective, row))
        else:
            words.append(f"{objective.name} was not measured again")
            if first and first[place].worse(error):
                claims[place] = first[place]
    verdict = _verdict(claims, error)
    others = {number: [gain or Gain(0.0, None) for gain in row] for number, row in measured.items() if number != named}
    more = better_of(others, tail(1))
    text = f"Trial {named} {verdict} {reference}: {', '.join(words)}; by a second measurement, with 95 % intervals."
    if more:
        numbers = ", ".join(map(str, more))
        text += f" Better, too: trial{'s' if len(more) > 1 else ''} {numbers}."
    wins = verdict == _BETTER
    return Headline(
        text=text,
        front=len(study.curve.front),
        better=len(more) + wins,
        best=named if wins else None,
        named=named,
        reference=reference,
        second=True,
        confidence=CONFIDENCE,
        gains=stated,
    )


def _by_first(study: StudySnapshot, theirs: Sequence[Axis], reference: str) -> Headline:
    """Returns the headline by what chose the front: bounds that hold for all layouts that were proposed, at once."""
    assert study.reference_point is not None, "the caller looks"
    order = naming_order(study.counted, theirs, study.reference_point)
    proposed = max(1, int(study.proposed().sum()))
    objectives = len(theirs)
    error = tail(proposed * objectives)
    dofs = _degrees(study)
    of_trials: Mapping[int, list[Gain]] = {number: gains(study.counted[number], theirs, dofs) for number in order}
    better = [number for number in order if is_better(of_trials[number], error, tail(objectives))]
    named = better[0] if better else order[0]
    stated, words, equal = list[StatedGain](), list[str](), list[str]()
    for objective, gain in zip(study.space.objectives, of_trials[named], strict=True):
        if gain.better(error) or gain.worse(error):
            row = _bound(objective, gain, error)
            stated.append(row)
            words.append(_bound_in_words(objective, row))
        else:
            equal.append(objective.name)
    words += [f"{_listed(equal)} equal within the noise"] if equal else []
    how = f"measured once, with bounds that hold for any of {proposed}" if proposed > 1 else "measured once"
    front = _layouts(len(order))
    if better:
        text = f"{len(better)} of {front} on the front {'are' if len(better) > 1 else 'is'} better than {reference}"
    else:
        text = f"{front} on the front, none shown to be better than {reference}"
    return Headline(
        text=f"{text} ({how}); trial {named}: {', '.join(words)}.",
        front=len(order),
        better=len(better),
        best=named if better else None,
        named=named,
        reference=reference,
        confidence=CONFIDENCE if stated else None,
        gains=stated,
    )


def _degrees(study: StudySnapshot) -> list[int | None]:
    """Returns for each objective the degrees of freedom of its noise; None where it is taken as known.

    That of quality is of few anchors. Far out, where bounds for many layouts are, this makes them twice as wide.
    """
    stored = (study.record.study.scales or {}).get("quality", {}).get(study.space.quality.rungs[-1].name)
    if stored is None:
        return [None] * len(study.space.objectives)
    scale = QualityScale.model_validate(stored)
    spreads = {"quality": scale.spreads, RECALL_METRIC: scale.recall_spreads}
    least = {name: min((max(1, int(row.dof)) for row in rows.values()), default=None) for name, rows in spreads.items()}
    return [least.get(objective.metric) for objective in study.space.objectives]


_BETTER = "is better than"


def _verdict(of_named: Sequence[Gain], error: float) -> str:
    if is_better(of_named, error, error):
        return _BETTER
    better, worse = any(gain.better(error) for gain in of_named), any(gain.worse(error) for gain in of_named)
    if better and worse:
        return "is better in part and worse in part than"
    return "is worse than" if worse else "is not shown to be better than"


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


def _stated(objective: Objective, gain: Gain, error: float) -> StatedGain:
    low, high = gain.bounds(error)
    ends = sorted(_change(objective, end) for end in (low, high))
    return StatedGain(objective=objective.name, change=_change(objective, gain.value), low=ends[0], high=ends[1])


def _bound(objective: Objective, gain: Gain, error: float) -> StatedGain:
    """Returns the end of the interval that is nearer to no difference."""
    low, high = gain.bounds(error)
    end = _change(objective, low if low > 0 else high)
    return StatedGain(
        objective=objective.name, change=None, low=end if end > 0 else None, high=end if end < 0 else None
    )


def _change(objective: Objective, gain: float) -> float:
    """Returns a gain as the change of the value: relative, or in the unit of a value whose reference is 1."""
    metric = METRICS[objective.metric]
    higher = gain if metric.direction == "max" else -gain
    return math.expm1(higher) if metric.transform == "log" else higher


def _interval_in_words(objective: Objective, row: StatedGain) -> str:
    """Formats such as 'latency 5.8 % lower (4.0 to 7.6 %)', 'quality 1.01 (0.98 to 1.04)'."""
    assert row.change is not None and row.low is not None and row.high is not None, "an interval has all three"
    if METRICS[objective.metric].transform != "log":
        value, low, high = (1 + number for number in (row.change, row.low, row.high))
        ends = show_range(value, low, high)
        return f"{objective.name} {show_number(value, low, high)}" + (f" ({ends})" if ends else "")
    sign, way = (1, "higher") if row.change > 0 else (-1, "lower")
    percent = 100 * sign * row.change
    low, high = sorted(100 * sign * end for end in (row.low, row.high))
    ends = show_range(percent, low, high)
    size = show_number(percent, low, high)
    what = f"{size} % {way}" if float(size.replace(",", "")) else "the same"
    return f"{objective.name} {what}" + (f" ({ends} %)" if ends else "")


def _bound_in_words(objective: Objective, row: StatedGain) -> str:
    """Formats such as 'latency at least 24 % lower', 'quality at least 0.12 lower'."""
    end = row.low if row.low is not None else row.high
    assert end is not None, "a bound has one end"
    size = show_share(abs(end)) if METRICS[objective.metric].transform == "log" else f"{abs(end):.2g}"
    return f"{objective.name} at least {size} {'higher' if end > 0 else 'lower'}"


def _layouts(count: int) -> str:
    return f"{count} layout{'s' if count > 1 else ''}"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


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
