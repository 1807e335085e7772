"""Quality: one number per candidate, with constants that the references fix once. No torch.

    quality = mean over groups g of  mean over seeds s of  score[g, s] / reference[g]

A score is an amount above chance (bits per byte or nats per label), so 0 is chance and 1 is the published reference at
the same rung. Nothing is normalised over a study's own trials: a number does not move when others come in.

Seeds. All layouts share start values and data order under a seed, so part of what a seed does is common to all and
says nothing about a layout. What is left, the *paired* spread, decides ties. Two or three seeds of two references
estimate it with one or two degrees of freedom, so it is pooled with `PRIOR`, the spread seen on the default protocol.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from nas.core.errors import InvalidInput

Scores = Mapping[str, float]
"""Evaluation group -> amount above chance, of one seed."""


class Spread(NamedTuple):
    """A standard deviation and the degrees of freedom that it was estimated with."""

    sd: float
    dof: float


PRIOR = Spread(sd=0.03, dof=2.0)
"""Paired spread of one seed's quality on the default protocol, as if seen with two degrees of freedom."""


class Quality(BaseModel):
    """A candidate's quality at one rung."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rung: str
    value: float
    per_group: dict[str, float] = Field(description="1 is the published reference")
    per_seed: dict[int, float] = Field(description="seeds that trained every group")
    sd: float = Field(description="paired standard deviation of one seed's quality")
    dof: float = Field(description="degrees of freedom behind `sd`, the prior's included")
    n_seeds: int = Field(description="seeds behind the worst-covered group")


class QualityScale(BaseModel):
    """The constants of one rung, decided once from the references."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rung: str
    reference: dict[str, float] = Field(description="group -> the published reference's mean score")
    left_out: dict[str, float] = Field(description="groups in which that score is below `minimum`; they do not count")
    minimum: float
    shifts: dict[int, float] = Field(default_factory=dict, description="seed -> what it does to all references alike")
    seed_sd: float = PRIOR.sd
    seed_dof: float = PRIOR.dof

    def quality(self, runs: Mapping[int, Scores]) -> Quality:
        """The quality of a layout.

        Args:
            runs: seed -> scores; a seed may lack groups that it was not trained on.

        Raises:
            KeyError: no seed has a score in a group that counts.
        """
        missing = [group for group in self.reference if not any(group in scores for scores in runs.values())]
        if missing:
            raise KeyError(f"rung {self.rung}: no score in {', '.join(missing)}")
        by_group = {
            group: [scores[group] / base for scores in runs.values() if group in scores]
            for group, base in self.reference.items()
        }
        per_group = {group: fmean(values) for group, values in by_group.items()}
        per_seed = self._per_seed(runs)
        spread = pool(Spread(self.seed_sd, self.seed_dof), self._own_spread(per_seed))
        return Quality(
            rung=self.rung,
            value=fmean(per_group.values()),
            per_group=per_group,
            per_seed=per_seed,
            sd=spread.sd,
            dof=spread.dof,
            n_seeds=min(map(len, by_group.values())),
        )

    def tie(self, a: Quality, b: Quality) -> bool:
        """Whether `a` and `b` cannot be told apart: they differ by less than twice the paired seed deviation.

        That deviation is of the difference on one seed, from the seeds both have, pooled with the scale's own. It is
        not divided by the root of the number of seeds: with two or three, a smaller margin would be a guess.
        """
        both = sorted(a.per_seed.keys() & b.per_seed.keys())
        differences = [a.per_seed[seed] - b.per_seed[seed] for seed in both]
        spread = pool(Spread(math.sqrt(2) * self.seed_sd, self.seed_dof), _sample_spread(differences))
        return abs(a.value - b.value) < 2 * spread.sd

    def _per_seed(self, runs: Mapping[int, Scores]) -> dict[int, float]:
        return {
            seed: fmean(scores[group] / base for group, base in self.reference.items())
            for seed, scores in sorted(runs.items())
            if self.reference.keys() <= scores.keys()
        }

    def _own_spread(self, per_seed: Mapping[int, float]) -> Spread:
        return _sample_spread([value - self.shifts[seed] for seed, value in per_seed.items() if seed in self.shifts])


def fix_scale(
    rung: str, published: Mapping[int, Scores], others: Sequence[Mapping[int, Scores]] = (), *, minimum: float
) -> QualityScale:
    """The scale of `rung`, from the scores of the reference layouts.

    Args:
        rung: its name.
        published: seed -> scores of the layout whose quality is 1.
        others: the same of the other references; they help to estimate the spread over seeds.
        minimum: least mean score at which a group counts.

    Raises:
        InvalidInput: the published reference learns nothing in this rung.
    """
    groups = sorted({group for scores in published.values() for group in scores})
    means = {group: fmean(s[group] for s in published.values() if group in s) for group in groups}
    kept = {group: mean for group, mean in means.items() if mean >= minimum}
    if not kept:
        raise InvalidInput(
            f"rung {rung!r}: the published reference scores below {minimum} in every group ({means}): it needs more"
            " steps or easier tasks"
        )
    left_out = {group: mean for group, mean in means.items() if group not in kept}
    scale = QualityScale(rung=rung, reference=kept, left_out=left_out, minimum=minimum)
    per_seed = [scale._per_seed(runs) for runs in (published, *others)]
    spread = pool(PRIOR, paired_spread(per_seed))
    return scale.model_copy(update={"shifts": _shifts(per_seed), "seed_sd": spread.sd, "seed_dof": spread.dof})


def paired_spread(layouts: Sequence[Mapping[int, float]]) -> Spread:
    """Deviation of one value after each layout's mean and each seed's common shift are taken out.

    Args:
        layouts: for each layout, seed -> value; only seeds that all have are used.

    Returns:
        The residual deviation of a two-way layout without interaction, with (layouts - 1) x (seeds - 1) degrees of
        freedom; 0 with 0 degrees where there are fewer than two of either.
    """
    seeds = _common_seeds(layouts)
    dof = (len(layouts) - 1) * (len(seeds) - 1)
    if dof < 1:
        return Spread(0.0, 0.0)
    shifts = _shifts(layouts)
    means = [fmean(layout[seed] for seed in seeds) for layout in layouts]
    residuals = [
        layout[seed] - mean - shifts[seed] for layout, mean in zip(layouts, means, strict=True) for seed in seeds
    ]
    return Spread(math.sqrt(math.fsum(r * r for r in residuals) / dof), dof)


def pool(*spreads: Spread) -> Spread:
    """One deviation from several, each weighted by its degrees of freedom."""
    dof = math.fsum(spread.dof for spread in spreads)
    return Spread(math.sqrt(math.fsum(s.dof * s.sd * s.sd for s in spreads) / dof), dof)


def _common_seeds(layouts: Sequence[Mapping[int, float]]) -> list[int]:
    return sorted(set.intersection(*(set(layout) for layout in layouts)))


def _shifts(layouts: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Seed -> mean over layouts of (value on that seed - the layout's mean over seeds)."""
    seeds = _common_seeds(layouts)
    if not seeds:
        return {}
    grand = fmean(layout[seed] for layout in layouts for seed in seeds)
    return {seed: fmean(layout[seed] for layout in layouts) - grand for seed in seeds}


def _sample_spread(values: Sequence[float]) -> Spread:
    if len(values) < 2:
        return Spread(0.0, 0.0)
    mean = fmean(values)
    dof = len(values) - 1
    return Spread(math.sqrt(math.fsum((v - mean) ** 2 for v in values) / dof), dof)
