"""Quality: one number per candidate, with constants that references and anchors fix once. No torch.

    quality = sum over groups g of  weight[g] x mean over seeds s of  score[g, s] / reference[g]

A score is an amount above chance (bits per byte or nats per label), so 0 is chance and 1 is the published reference at
the same rung. Nothing is normalised over a study's own trials: more trials do not change a number.

Seeds: all layouts share start values and data order under a seed, so part of its effect is common to all layouts. The
rest, the *paired* spread, is the noise of a comparison. It is estimated per unit, which is one training, whose groups
vary together: all domains of the language model are one unit, and each task is one.

Anchors are the references and a few layouts spread over the space, each trained with several seeds. They say, per
group, how far layouts differ (*signal*) and how far one layout's seeds do (*noise*). A group whose signal is less than
`MIN_SNR` times its noise does not count (Heineman et al. 2025, Signal and Noise, find that this ratio predicts whether
an evaluation decides rightly); the others weigh by precision, see `_weights`. Without anchors all groups count, and
priors are most of what is known about noise and all that is known about signal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from nas.core.errors import InvalidInput
from nas.core.metrics import RECALL
from nas.search.proxy.job import is_part

Scores = Mapping[str, float]
"""Evaluation group -> amount above chance, of one seed."""


class Spread(NamedTuple):
    """A standard deviation and the degrees of freedom that it was estimated with."""

    sd: float
    dof: float


LM_PRIOR = Spread(sd=0.02, dof=4.0)
"""Prior of the paired spread over seeds of a language model's score / reference (`with_prior`). Measured at width 64:
0.014 at 300 and at 600 steps, 0.02 between the references."""
TASK_PRIOR = Spread(sd=0.25, dof=4.0)
"""The same of tasks. Measured at width 64: selective copy 0.25 at 160 steps (12 degrees of freedom) and 0.21 at 240,
induction 0.06."""

LM_SIGNAL = 0.12
"""Prior of the standard deviation of a language model's score / reference between layouts of a space, without anchors.
Measured with those of `lfm2-study`: domains of text 0.06 to 0.17 at 128 steps."""
TASK_SIGNAL = 0.35
"""The same of tasks. Measured with those of `lfm2-study`: selective copy 0.34 at 160 steps."""

MIN_SNR = 2.0
"""Least signal / noise of a group that counts: differences of two such layouts have the right sign 85 times in 100."""


class Quality(BaseModel):
    """A candidate's quality at one rung."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rung: str
    value: float
    per_group: dict[str, float] = Field(description="group -> mean score over seeds; 1 is the published reference")
    sd: float = Field(description="paired standard deviation of `value` over seeds")
    n_seeds: int = Field(description="seeds of the group that has fewest")
    recall: float | None = Field(None, description="mean of the groups of recall; null where none counts")
    recall_sd: float = Field(0.0, description="paired standard deviation of `recall` over seeds")

    def to_json(self) -> dict[str, Any]:
        """Returns what is stored; recall only where a group of it counts."""
        return self.model_dump(mode="json", exclude={"recall", "recall_sd"} if self.recall is None else None)


class Signal(NamedTuple):
    """Deviations of a group's score / reference between anchors, and of a rung's mean of seeds."""

    between: float
    noise: float

    @property
    def ratio(self) -> float:
        """Signal to noise."""
        return self.between / self.noise if self.noise else math.inf


class QualityScale(BaseModel):
    """Constants of one rung, computed once from the references and anchors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rung: str
    reference: dict[str, float] = Field(description="group -> the published reference's mean score")
    left_out: dict[str, float] = Field(description="group that does not count -> the published reference's mean score")
    noisy_recall: dict[str, float] = Field(
        default_factory=dict, description="those of `left_out` that count in recall, whose noise is stated"
    )
    minimum: float
    spreads: dict[str, Spread] = Field(description="unit -> paired spread of one seed, of its part of the quality")
    recall_spreads: dict[str, Spread] = Field(
        default_factory=dict, description="the same of its part of recall; none where no group of recall counts"
    )
    reasons: dict[str, str] = Field(default_factory=dict, description="group that does not count -> why")
    weights: dict[str, float] = Field(default_factory=dict, description="group -> weight; none: all are equal")
    signals: dict[str, Signal] = Field(default_factory=dict, description="group -> what the anchors show of it")
    anchors: int = Field(0, description="layouts that gave `signals`, references included; 0: there are no anchors")

    def quality(self, runs: Mapping[int, Scores]) -> Quality:
        """Returns the quality of a layout.

        Args:
            runs: seed -> scores; a seed may lack groups that it was not trained on.

        Raises:
            KeyError: no seed has a score in a group that counts.
        """
        ratios = {group: _ratios(runs, group, base) for group, base in self._scored.items()}
        if missing := [group for group, values in ratios.items() if not values]:
            raise KeyError(f"rung {self.rung}: no score in {', '.join(missing)}")
        per_group = {group: fmean(values.values()) for group, values in ratios.items()}
        seeds = {unit_of(group): len(values) for group, values in ratios.items()}
        value, sd = _mean(per_group, self.group_weights, seeds, self.spreads)
        recalled = recall_of(per_group)
        recall, recall_sd = _mean(per_group, recalled, seeds, self.recall_spreads) if recalled else (None, 0.0)
        return Quality(
            rung=self.rung,
            value=value,
            per_group=per_group,
            sd=sd,
            n_seeds=min(map(len, ratios.values())),
            recall=recall,
            recall_sd=recall_sd,
        )

    def per_seed(self, runs: Mapping[int, Scores]) -> dict[int, float]:
        """Returns seed -> the quality that it alone gives, of seeds that have a score in every group that counts."""
        whole = {seed: scores for seed, scores in runs.items() if self.reference.keys() <= scores.keys()}
        without = self.model_copy(update={"noisy_recall": {}})
        return {seed: without.quality({seed: scores}).value for seed, scores in whole.items()}

    def rescored(self, published: Mapping[int, Scores]) -> QualityScale:
        """Returns the scale for other seeds, from the scores of the published reference there.

        A score below `minimum` counts as that: ratios to what the reference hardly learns have no bound.
        A group of recall that was trained with these seeds alone counts in recall, with the prior of its noise.
        """
        groups = {group for scores in published.values() for group in recall_of(scores) if not is_part(group, scores)}
        new = groups - {*self.reference, *self.left_out}
        means = {group: fmean(_ratios(published, group, 1.0).values()) for group in {*self._scored, *new}}
        bases = {group: max(mean, self.minimum) for group, mean in means.items()}
        noisy = {group: bases[group] for group in self.noisy_recall}
        noisy |= {group: means[group] for group in sorted(new) if means[group] >= self.minimum}
        recalled = recall_of({**self.reference, **noisy})
        return self.model_copy(
            update={
                "reference": {group: bases[group] for group in self.reference},
                "noisy_recall": noisy,
                "recall_spreads": {unit_of(group): TASK_PRIOR for group in recalled} | self.recall_spreads,
            }
        )

    @property
    def _scored(self) -> dict[str, float]:
        """The groups of quality and of recall."""
        return self.reference | self.noisy_recall

    @property
    def dof(self) -> int | None:
        """Least degrees of freedom of the noise of its parts; None where it has none."""
        return min((max(1, int(spread.dof)) for spread in self.spreads.values()), default=None)

    @property
    def recall_dof(self) -> int | None:
        """The same of recall."""
        return min((max(1, int(spread.dof)) for spread in self.recall_spreads.values()), default=None)

    def with_noise_of(self, layouts: Sequence[Mapping[int, Scores]]) -> QualityScale:
        """Returns the scale with its spreads pooled with those of further layouts, which have the same seeds."""
        changes = {}
        for name, members in (("spreads", self.group_weights), ("recall_spreads", recall_of(self._scored))):
            before: Mapping[str, Spread] = getattr(self, name)
            spreads = _spreads(layouts, self._scored, members)
            changes[name] = {unit: pool(before[unit], spreads[unit]) for unit in spreads}
        return self.model_copy(update=changes)

    def sd_of(self, seeds: int) -> float:
        """Returns the paired standard deviation of a quality that is the mean of so many seeds."""
        return _mean(self.reference, self.group_weights, dict.fromkeys(self.spreads, seeds), self.spreads)[1]

    @property
    def group_weights(self) -> Mapping[str, float]:
        """Group -> its weight, not normalised."""
        return self.weights or dict.fromkeys(self.reference, 1.0)


@dataclass(frozen=True)
class Anchors:
    """Scores of the references and anchors of a space at one rung.

    Args:
        layouts: for each layout, seed -> scores; every layout has the same seeds.
        seeds: group's unit -> seeds with which a candidate is trained at the rung.
    """

    layouts: Sequence[Mapping[int, Scores]]
    seeds: Mapping[str, int]


def fix_scale(
    rung: str,
    published: Mapping[int, Scores],
    others: Sequence[Mapping[int, Scores]] = (),
    *,
    minimum: float,
    anchors: Anchors | None = None,
) -> QualityScale:
    """Returns the scale of `rung`, from the scores of the reference layouts.

    Args:
        rung: its name.
        published: seed -> scores of the layout whose quality is 1.
        others: the same of the other references, for the spread over seeds.
        minimum: least mean score at which a group counts.
        anchors: what noise and signal are estimated from; None: noise from the references alone.

    Raises:
        InvalidInput: the published reference learns nothing in this rung.
    """
    groups = sorted({group for scores in published.values() for group in scores if not is_part(group, scores)})
    means = {group: fmean(_ratios(published, group, 1.0).values()) for group in groups}
    learned = {group: mean for group, mean in means.items() if mean >= minimum}
    if not learned:
        raise InvalidInput(
            f"rung {rung!r}: the published reference scores below {minimum} in every group ({means}): it needs more"
            " steps or easier tasks"
        )
    layouts = (published, *others) if anchors is None else anchors.layouts
    signals = {} if anchors is None else {group: _signal(anchors, group, base) for group, base in learned.items()}
    reference, reasons = _counted(learned, signals)
    for group, mean in means.items():
        if group not in learned:
            reasons[group] = f"the published reference scores {mean:.3g} above chance, less than {minimum:g}"
    weights = _weights({group: signals.get(group) or _prior_signal(group, published) for group in reference})
    noisy_recall = {group: learned[group] for group in recall_of(learned) if group not in reference}
    for group in noisy_recall:
        reasons[group] += "; it counts in recall alone"
    recalled = _spreads(layouts, learned, recall_of(learned))
    return QualityScale(
        rung=rung,
        reference=reference,
        left_out={group: mean for group, mean in means.items() if group not in reference},
        noisy_recall=noisy_recall,
        minimum=minimum,
        spreads={
            unit: with_prior(_prior(unit), spread) for unit, spread in _spreads(layouts, reference, weights).items()
        },
        recall_spreads={unit: with_prior(TASK_PRIOR, spread) for unit, spread in recalled.items()},
        reasons=dict(sorted(reasons.items())),
        weights=weights,
        signals=signals,
        anchors=len(layouts) if anchors is not None else 0,
    )


def _counted(learned: Scores, signals: Mapping[str, Signal]) -> tuple[dict[str, float], dict[str, str]]:
    """Returns the groups that count, and why others do not; the one of the most signal always counts."""
    if not signals:
        return dict(learned), {}
    best = max(signals, key=lambda group: signals[group].ratio)
    reasons = {
        group: f"signal to noise {signal.ratio:.2g} on the space's anchors, less than {MIN_SNR:g}"
        for group, signal in signals.items()
        if signal.ratio < MIN_SNR and group != best
    }
    return {group: base for group, base in learned.items() if group not in reasons}, reasons


def _weights(signals: Mapping[str, Signal]) -> dict[str, float]:
    """Returns group -> weight, with a sum of 1.

    Divided by its signal, a group is the skill that groups share, what is special to it, and noise of the variance
    (noise / signal)^2. With as much special as shared variance, the precision of a group about the shared skill is
    1 / (1 + (noise / signal)^2), which is its reliability. Without the special part a group that happened to be
    trained in little noise would be the whole score.
    """
    precision = {
        group: 1 / (1 + (signal.noise / signal.between) ** 2) / signal.between if signal.between else 1.0
        for group, signal in signals.items()
    }
    total = math.fsum(precision.values())
    return {group: value / total for group, value in precision.items()}


def _prior_signal(group: str, published: Mapping[int, Scores]) -> Signal:
    """Returns the prior's signal and noise of a group that is trained with as many seeds as in `published`."""
    between, spread = (LM_SIGNAL, LM_PRIOR) if unit_of(group) == "lm" else (TASK_SIGNAL, TASK_PRIOR)
    return Signal(between, spread.sd / math.sqrt(sum(group in scores for scores in published.values())))


def _signal(anchors: Anchors, group: str, base: float) -> Signal:
    """Returns signal and noise of a group: variance components of layouts x seeds, without the seeds' common shift."""
    values = [_ratios(layout, group, base) for layout in anchors.layouts]
    seeds = sorted(set.intersection(*map(set, values)))
    means = [fmean(ratios[seed] for seed in seeds) for ratios in values]
    spread = with_prior(_prior(unit_of(group)), paired_spread(values))
    between = max(0.0, _variance(means) - spread.sd**2 / len(seeds))
    return Signal(math.sqrt(between), spread.sd / math.sqrt(anchors.seeds[unit_of(group)]))


def _mean(
    values: Mapping[str, float], weights: Mapping[str, float], seeds: Mapping[str, int], spreads: Mapping[str, Spread]
) -> tuple[float, float]:
    """Returns the weighted mean over groups and its deviation; `seeds` has the number of seeds per unit.

    Units are independent trainings, so the variances of their parts of the mean add up.
    """
    total = math.fsum(weights.values())
    share = dict.fromkeys(map(unit_of, weights), 0.0)
    for group, weight in weights.items():
        share[unit_of(group)] += weight / total
    variances = ((part * spreads[unit].sd) ** 2 / seeds[unit] for unit, part in share.items())
    mean = math.fsum(weight * values[group] for group, weight in weights.items()) / total
    return mean, math.sqrt(math.fsum(variances))


def recall_of(groups: Iterable[str]) -> dict[str, float]:
    """Returns the weights of the groups of recall among `groups`: all are equal."""
    return {group: 1.0 for group in groups if group.startswith(RECALL)}


def _spreads(
    layouts: Sequence[Mapping[int, Scores]], reference: Scores, weights: Mapping[str, float]
) -> dict[str, Spread]:
    """Returns unit -> paired spread of the weighted mean over those of its groups that have a weight."""
    spreads = {}
    for unit in sorted(set(map(unit_of, weights))):
        members = {group: weight for group, weight in weights.items() if unit_of(group) == unit}
        spreads[unit] = paired_spread([_unit_values(runs, reference, members) for runs in layouts])
    return spreads


def _variance(values: Sequence[float]) -> float:
    mean = fmean(values)
    return math.fsum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)


def unit_of(group: str) -> str:
    """Returns the unit of a group: 'lm' for all domains, else the group itself."""
    return "lm" if group.startswith("lm/") else group


def paired_spread(layouts: Sequence[Mapping[int, float]]) -> Spread:
    """Returns the deviation of one value without each layout's mean and each seed's common shift.

    Args:
        layouts: for each layout, seed -> value; only seeds that all have are used.

    Returns:
        The residual deviation of a two-way layout without interaction, with (layouts - 1) x (seeds - 1) degrees of
        freedom; 0 with 0 degrees where there are fewer than two of either.
    """
    seeds = sorted(set.intersection(*(set(layout) for layout in layouts)))
    dof = (len(layouts) - 1) * (len(seeds) - 1)
    if dof < 1:
        return Spread(0.0, 0.0)
    by_layout = [fmean(layout[seed] for seed in seeds) for layout in layouts]
    by_seed = {seed: fmean(layout[seed] for layout in layouts) for seed in seeds}
    grand = fmean(by_layout)
    residuals = [
        layout[seed] - mean - by_seed[seed] + grand
        for layout, mean in zip(layouts, by_layout, strict=True)
        for seed in seeds
    ]
    return Spread(math.sqrt(math.fsum(r * r for r in residuals) / dof), dof)


def pool(*spreads: Spread) -> Spread:
    """Pools deviations into one, with variances weighted by degrees of freedom."""
    dof = math.fsum(spread.dof for spread in spreads)
    return Spread(math.sqrt(math.fsum(s.dof * s.sd * s.sd for s in spreads) / dof), dof)


def _prior(unit: str) -> Spread:
    return LM_PRIOR if unit == "lm" else TASK_PRIOR


def with_prior(prior: Spread, estimate: Spread) -> Spread:
    """Returns an estimated spread pooled with a prior, which loses one degree of freedom for two of the estimate."""
    return pool(Spread(prior.sd, max(0.0, prior.dof - estimate.dof / 2)), estimate)


def _ratios(runs: Mapping[int, Scores], group: str, base: float) -> dict[int, float]:
    """Returns seed -> score / base for the seeds that were trained on `group`."""
    return {seed: scores[group] / base for seed, scores in runs.items() if group in scores}


def _unit_values(runs: Mapping[int, Scores], reference: Scores, weights: Mapping[str, float]) -> dict[int, float]:
    """Returns seed -> weighted mean of score / reference over the groups of one unit."""
    ratios = {group: _ratios(runs, group, reference[group]) for group in weights}
    total, first = math.fsum(weights.values()), next(iter(ratios.values()))
    return {
        seed: math.fsum(weights[group] * values[seed] for group, values in ratios.items()) / total for seed in first
    }
