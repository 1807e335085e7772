"""What a study found, in sentences: what won, by how much, and how sure.

Where the front was measured again, the sentence is of the second measurement alone (`nas.search.analysis.second`).
Otherwise it holds what is sure whichever of the layouts had won: bounds that hold for all that were proposed at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache

from pydantic import BaseModel, Field

from nas.core.comparison import CONFIDENCE, Gain, better_of, gains, is_better, naming_order, tail
from nas.core.layout import Layout
from nas.core.metrics import METRICS, RECALL_METRIC
from nas.core.published import MODELS
from nas.core.scoring import PUBLISHED, Axis
from nas.core.space import Objective
from nas.core.units import show_number, show_range, show_share
from nas.search.analysis.reliability import quality_reliability, top_scale
from nas.search.analysis.second import second_gains
from nas.search.analysis.snapshot import StudySnapshot


class StatedGain(BaseModel):
    """A difference to the reference that a headline states: of a ratio its change, of quality the difference."""

    objective: str
    change: float | None = Field(description="below 0: the trial's is lower; null where only bounds are stated")
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
    reference_axes = [axis for axis in published.axes if axis] if published else []
    reference = _name(published.layout) if published else None
    if not front:
        return Headline(text=_without_front(study), front=0, better=0, best=None, reference=reference)
    if reference is None or len(reference_axes) < len(study.space.objectives):
        return Headline(text=f"{_layouts(front)} on the front.", front=front, better=0, best=None, reference=None)
    result = _by_second(study, reference_axes, reference) or _by_first(study, reference_axes, reference)
    return result.model_copy(update={"text": result.text + _reliability(study)})


def _by_second(study: StudySnapshot, reference_axes: Sequence[Axis], reference: str) -> Headline | None:
    """Returns the headline by the second measurement; None without one.

    Half of the chance of a mistake is the named trial's, half is that of all others together.
    """
    measured = second_gains(study.record)
    if not measured:
        return None
    named, of_named = next(iter(measured.items()))
    error = tail(len(reference_axes))
    first = gains(study.counted[named], reference_axes) if named in study.counted else []
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
    wins = is_better(claims, error, error)
    others = {number: [gain or Gain(0.0, None) for gain in row] for number, row in measured.items() if number != named}
    more = better_of(others, tail(1))
    figures = f"{', '.join(words)}; by a second measurement, with 95 % intervals"
    numbers = f"trial{'s' if len(more) > 1 else ''} {_listed([*map(str, more)])}"
    if wins:
        text = f"Trial {named} is better than {reference}: {figures}." + (f" Better, too: {numbers}." if more else "")
    else:
        text = f"{numbers.capitalize()} {'are' if len(more) > 1 else 'is'}" if more else "No layout is shown to be"
        rank = "first" if more else "nearest"
        text += f" better than {reference}. Trial {named}, {rank} before, {_verdict(claims, error)}: {figures}."
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


def _by_first(study: StudySnapshot, reference_axes: Sequence[Axis], reference: str) -> Headline:
    """Returns the headline by what chose the front: bounds that hold for all layouts that were proposed, at once."""
    assert study.reference_point is not None, "the caller looks"
    order = naming_order(study.counted, reference_axes, study.reference_point)
    proposed = max(1, int(study.proposed().sum()))
    objectives = len(reference_axes)
    error = tail(proposed * objectives)
    dofs = _degrees(study)
    of_trials: Mapping[int, list[Gain]] = {
        number: gains(study.counted[number], reference_axes, dofs) for number in order
    }
    better = [number for number in order if is_better(of_trials[number], error, tail(objectives))]
    named = better[0] if better else order[0]
    stated = [
        _bound(objective, gain, error) for objective, gain in zip(study.space.objectives, of_trials[named], strict=True)
    ]
    words = [_bound_in_words(objective, row) for objective, row in zip(study.space.objectives, stated, strict=True)]
    how = f"measured once, with bounds that hold for any of {proposed}" if proposed > 1 else "measured once"
    front = _layouts(len(order))
    if better:
        text = f"{len(better)} of {front} on the front {'are' if len(better) > 1 else 'is'} better than {reference}"
    else:
        text = f"{front} on the front, none shown to be better than {reference}"
    return Headline(
        text=f"{text} ({how}); {'' if better else 'nearest, '}trial {named}: {', '.join(words)}.",
        front=len(order),
        better=len(better),
        best=named if better else None,
        named=named,
        reference=reference,
        confidence=CONFIDENCE,
        gains=stated,
    )


def _degrees(study: StudySnapshot) -> list[int | None]:
    """Returns for each objective the degrees of freedom of its noise; None where it is taken as known.

    That of quality is of few anchors. Far out, where bounds for many layouts are, this makes them twice as wide.
    """
    scale = top_scale(study)
    least = {} if scale is None else {"quality": scale.dof, RECALL_METRIC: scale.recall_dof}
    return [least.get(objective.metric) for objective in study.space.objectives]


def _verdict(of_named: Sequence[Gain], error: float) -> str:
    """Returns what a layout that is not better than the reference is."""
    better, worse = any(gain.better(error) for gain in of_named), any(gain.worse(error) for gain in of_named)
    if better and worse:
        return "is better in part and worse in part"
    return "is worse" if worse else "cannot be told apart from it"


def _without_front(study: StudySnapshot) -> str:
    """Returns why nothing is on the front: what became of the trials."""
    states = study.states()
    outcomes = {
        "with a broken budget": states.get("infeasible", 0),
        "stopped early": states.get("stopped", 0),
        "failed": states.get("failed", 0),
    }
    yet = "" if study.over else " yet"
    if not any(outcomes.values()):
        return f"Nothing has won{yet}: no trial has ended."
    became = "; ".join(f"{count} {what}" for what, count in outcomes.items() if count)
    return f"Nothing has won{yet}. Of {sum(states.values())} trials: {became}."


def _stated(objective: Objective, gain: Gain, error: float) -> StatedGain:
    low, high = gain.bounds(error)
    ends = sorted(_change(objective, end) for end in (low, high))
    return StatedGain(objective=objective.name, change=_change(objective, gain.value), low=ends[0], high=ends[1])


def _bound(objective: Objective, gain: Gain, error: float) -> StatedGain:
    """Returns the end of the interval that is nearer to no difference; both where it holds no difference, if known."""
    if gain.sd is None:
        return StatedGain(objective=objective.name, change=None, low=None, high=None)
    low, high = sorted(_change(objective, end) for end in gain.bounds(error))
    return StatedGain(
        objective=objective.name, change=None, low=None if high < 0 else low, high=None if low > 0 else high
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
    """Formats such as 'latency at least 24 % lower', 'quality 0.03 lower to 0.012 higher'."""

    def size(end: float) -> str:
        number = show_share(abs(end)) if METRICS[objective.metric].transform == "log" else f"{abs(end):.2g}"
        return f"{number} {'higher' if end > 0 else 'lower'}"

    if row.low is not None and row.high is not None:
        ends = f"{size(row.low)} to {size(row.high)}"
        return f"{objective.name} {ends if row.low < row.high else 'the same'}"
    end = row.low if row.low is not None else row.high
    return f"{objective.name} {'unknown' if end is None else f'at least {size(end)}'}"


def _layouts(count: int) -> str:
    return f"{count} layout{'s' if count > 1 else ''}"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def _reliability(study: StudySnapshot) -> str:
    """Returns a sentence on how far qualities order the layouts, the best third and the front; '' without a front."""
    reliability = quality_reliability(study)
    if reliability is None:
        return ""
    if reliability.orders is None:
        return f" Too few layouts have a quality ({reliability.candidates}) to tell how far it orders them."
    assert reliability.overall is not None and reliability.top_third is not None, "there are enough"
    noise = reliability.front_noise
    front = "" if noise is None else f"; {show_share(noise)} of the front's members are there by noise"
    overall = f"reliability {reliability.overall:.2f}"
    if not reliability.orders:
        return f" Differences in quality between the layouts may be mostly noise ({overall}){front}."
    if reliability.orders_top:
        return f" Quality orders the layouts ({overall}), the best third too ({reliability.top_third:.2f}){front}."
    return (
        f" Quality tells good layouts from bad ({overall}); that it orders the best third is not shown"
        f" ({reliability.top_third:.2f}){front}."
    )


def _name(layout: Layout) -> str:
    """Returns the name under which a reference layout was published, else what spaces call it."""
    return _published().get(layout.id, f"the {PUBLISHED} reference")


@cache
def _published() -> Mapping[str, str]:
    return {Layout.parse(text).id: name for name, text in MODELS.items()}
