"""Quality: one number per candidate, with constants that the references fix once. No torch.

    quality = mean over groups g of  mean over seeds s of  score[g, s] / reference[g]

A score is an amount above chance (bits per byte or nats per label), so 0 is chance and 1 is the published reference at
the same rung. Nothing is normalised over a study's own trials: more trials do not change a number.

Seeds: all layouts share start values and data order under a seed, so part of its effect is common to all layouts. The
rest, the *paired* spread, is the noise of a comparison. It is estimated per unit, which is one training, whose groups
vary together: all domains of the language model are one unit, and each task is one. Two references with two seeds
estimate it with a single degree of freedom, so it is pooled with a prior measured on the default protocol.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from nas.core.errors import InvalidInput
from nas.proxy.job import is_part

Scores = Mapping[str, float]
"""Evaluation group -> amount above chance, of one seed."""


class Spread(NamedTuple):
    """A standard deviation and the degrees of freedom that it was estimated with."""

    sd: float
    dof: float


LM_PRIOR = Spread(sd=0.02, dof=4.0)
TASK_PRIOR = Spread(sd=0.15, dof=4.0)
"""Paired spread over seeds of a unit's score / reference, as seen on the default protocol with four layouts of width 64
and depth 8 and three seeds: language model 0.014 at 300 and at 600 steps (0.02 between the references); selective copy
0.21 and induction 0.06 at 240 steps."""


class Quality(BaseModel):
    """A candidate's quality at one rung."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rung: str
    value: float
    per_group: dict[str, float] = Field(description="group -> mean score over seeds; 1 is the published reference")
    sd: float = Field(description="paired standard deviation of `value` over seeds")
    n_seeds: int = Field(description="seeds of the group that has fewest")


class QualityScale(BaseModel):
    """Constants of one rung, computed once from the references."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rung: str
    reference: dict[str, float] = Field(description="group -> the published reference's mean score")
    left_out: dict[str, float] = Field(description="groups in which that score is below `minimum`; they do not count")
    minimum: float
    spreads: dict[str, Spread] = Field(description="unit -> paired spread of one seed")

    def quality(self, runs: Mapping[int, Scores]) -> Quality:
        """Returns the quality of a layout.

        Args:
            runs: seed -> scores; a seed may lack groups that it was not trained on.

        Raises:
            KeyError: no seed has a score in a group that counts.
        """
        ratios = {group: _ratios(runs, group, base) for group, base in self.reference.items()}
        if missing := [group for group, values in ratios.items() if not values]:
            raise KeyError(f"rung {self.rung}: no score in {', '.join(missing)}")
        per_group = {group: fmean(values.values()) for group, values in ratios.items()}
        return Quality(
            rung=self.rung,
            value=fmean(per_group.values()),
            per_group=per_group,
            sd=self._sd({unit_of(group): len(values) for group, values in ratios.items()}),
            n_seeds=min(map(len, ratios.values())),
        )

    def _sd(self, seeds: Mapping[str, int]) -> float:
        """Returns the deviation of the mean over groups; `seeds` has the number of seeds per unit.

        Units are independent trainings, so the variances of their parts of the mean add up.
        """
        units = [unit_of(group) for group in self.reference]
        share = {unit: units.count(unit) / len(units) for unit in seeds}
        return math.sqrt(math.fsum((share[u] * self.spreads[u].sd) ** 2 / n for u, n in seeds.items()))


def fix_scale(
    rung: str, published: Mapping[int, Scores], others: Sequence[Mapping[int, Scores]] = (), *, minimum: float
) -> QualityScale:
    """Returns the scale of `rung`, from the scores of the reference layouts.

    Args:
        rung: its name.
        published: seed -> scores of the layout whose quality is 1.
        others: the same of the other references, for the spread over seeds.
        minimum: least mean score at which a group counts.

    Raises:
        InvalidInput: the published reference learns nothing in this rung.
    """
    groups = sorted({group for scores in published.values() for group in scores if not is_part(group)})
    means = {group: fmean(_ratios(published, group, 1.0).values()) for group in groups}
    kept = {group: mean for group, mean in means.items() if mean >= minimum}
    if not kept:
        raise InvalidInput(
            f"rung {rung!r}: the published reference scores below {minimum} in every group ({means}): it needs more"
            " steps or easier tasks"
        )
    units = {unit: [group for group in kept if unit_of(group) == unit] for unit in sorted(map(unit_of, kept))}
    return QualityScale(
        rung=rung,
        reference=kept,
        left_out={group: mean for group, mean in means.items() if group not in kept},
        minimum=minimum,
        spreads={
            unit: pool(
                _prior(unit), paired_spread([_unit_values(runs, kept, members) for runs in (published, *others)])
            )
            for unit, members in units.items()
        },
    )


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


def _ratios(runs: Mapping[int, Scores], group: str, base: float) -> dict[int, float]:
    """Returns seed -> score / base for the seeds that were trained on `group`."""
    return {seed: scores[group] / base for seed, scores in runs.items() if group in scores}


def _unit_values(runs: Mapping[int, Scores], reference: Scores, groups: Sequence[str]) -> dict[int, float]:
    """Returns seed -> mean of score / reference over the groups of one unit."""
    ratios = [_ratios(runs, group, reference[group]) for group in groups]
    return {seed: fmean(values[seed] for values in ratios) for seed in ratios[0]}
