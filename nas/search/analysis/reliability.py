"""How far the quality of a study can be trusted: reliability, fresh seeds, and groups that do not count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, variance

from pydantic import BaseModel, Field

from nas.core.units import show_share
from nas.search.analysis.snapshot import StudySnapshot
from nas.search.proxy.quality import QualityScale, paired_spread

_FEWEST = 3
"""Candidates from which a variance is computed."""
_LEAST = 9
"""Candidates from which it is said whether qualities order them: a third of them is three."""
_RELIABLE = 0.5
"""Reliability below which more than half of the variance between candidates is noise."""
_ERROR = 0.025
"""Chance of each of the two statements, of all candidates and of the best third, where these are all equal."""
_INFINITE_DOF = 10**6
"""Degrees of freedom of a deviation that is known."""


class QualityReliability(BaseModel):
    """The reliability of the qualities of the complete candidates, by the classical definition of test theory.

    It is 1 - noise variance / variance between candidates: the squared correlation of a quality with its expectation
    over seeds. 0 where noise explains all differences.
    """

    candidates: int = Field(description="complete ones that count for the front")
    overall: float | None = Field(description="of all of them; null for fewer than three")
    top_third: float | None = Field(description="of the third of highest quality; null for fewer than three in it")
    orders: bool | None = Field(
        description="whether qualities order the candidates: reliability of 0.5, and more variance than noise alone has"
        " in 97.5 % of studies (F test); null for fewer than nine"
    )
    orders_top: bool | None = Field(description="the same within the best third")
    front_noise: float | None = Field(
        description="share of the front's members that are there by noise alone; null if it cannot be drawn"
    )
    rescored: int = Field(description="candidates whose quality is of fresh seeds")
    seeds: int = Field(description="fresh seeds")
    stated_sd: float | None = Field(
        description="standard deviation of a quality of fresh seeds, as it was stated before they were trained"
    )
    seen_sd: float | None = Field(description="the same, from the fresh seeds themselves; null for fewer than two")
    left_out: dict[str, str] = Field(description="evaluation group that does not count -> why")
    text: str = Field(description="all of it as a sentence")


def quality_reliability(study: StudySnapshot) -> QualityReliability | None:
    """Returns the reliability of a study's qualities; None before there is a front."""
    return study.cached("reliability", lambda: _reliability(study))


def reliability(values: Sequence[float], sds: Sequence[float]) -> float | None:
    """Returns 1 - mean noise variance / variance of the values, at least 0; None for fewer than three values."""
    if len(values) < _FEWEST:
        return None
    between = variance(values)
    return max(0.0, 1 - fmean(sd * sd for sd in sds) / between) if between > 0 else 0.0


def part_reliability(part: Sequence[float], values: Sequence[float], overall: float | None) -> float | None:
    """Returns the reliability within a part of the values that was cut by the values themselves.

    Noise helped to choose such a part, so that its variance is not noise + signal: with normal signal and noise its
    squared correlation is rho^2 V / (rho^2 V + rho (1 - rho) S), of the variances V of the part and S of all.

    Args:
        part: of the values.
        values: all of them.
        overall: their reliability rho.
    """
    if len(part) < _FEWEST or overall is None:
        return None
    signal, rest = overall * overall * variance(part), overall * (1 - overall) * variance(values)
    return signal / (signal + rest) if signal > 0 else 0.0


def top_scale(study: StudySnapshot) -> QualityScale | None:
    """Returns the quality scale of a study's top rung; None before it is fixed."""
    stored = (study.record.study.scales or {}).get("quality", {}).get(study.space.quality.rungs[-1].name)
    return None if stored is None else QualityScale.model_validate(stored)


def _exceeds_noise(pairs: Sequence[tuple[float, float]], share: float | None, dof: int | None) -> bool:
    """Returns whether values with stated deviations are reliable, and differ by more than that (F test).

    Args:
        pairs: values with their standard deviations.
        share: their reliability.
        dof: degrees of freedom of the deviations; None: they are known.
    """
    from scipy.special import fdtri  # type: ignore[import-untyped]

    values, sds = zip(*pairs, strict=True)
    least = fdtri(len(pairs) - 1, dof or _INFINITE_DOF, 1 - _ERROR) * fmean(sd * sd for sd in sds)
    return share is not None and share >= _RELIABLE and variance(values) > least


def _reliability(study: StudySnapshot) -> QualityReliability | None:
    if not study.curve.front:
        return None
    records = [study.records[trial] for trial in study.counted]
    qualities = sorted((record.quality.value, record.quality.sd) for record in records if record.quality is not None)
    values = [value for value, _ in qualities]
    top = qualities[-math.ceil(len(values) / 3) :]
    overall = reliability(*zip(*qualities, strict=True)) if qualities else None
    of_top = part_reliability([value for value, _ in top], values, overall)
    scale, enough = top_scale(study), len(values) >= _LEAST
    dof = None if scale is None else scale.dof
    fresh = [record.rescored for record in records if record.rescored is not None]
    spread = paired_spread([rescored.per_seed for rescored in fresh]) if len(fresh) > 1 else None
    seeds = len(fresh[0].per_seed) if fresh else 0
    result = QualityReliability(
        candidates=len(qualities),
        overall=overall,
        top_third=of_top,
        orders=_exceeds_noise(qualities, overall, dof) if enough else None,
        orders_top=_exceeds_noise(top, of_top, dof) if enough else None,
        front_noise=study.front_noise,
        rescored=len(fresh),
        seeds=seeds,
        stated_sd=scale.sd_of(seeds) if scale is not None and seeds else None,
        seen_sd=spread.sd / math.sqrt(seeds) if spread is not None and spread.dof else None,
        left_out={group: scale.reasons[group] for group in sorted(scale.left_out)} if scale else {},
        text="",
    )
    return result.model_copy(update={"text": _text(result)})


def _text(summary: QualityReliability) -> str:
    parts = []
    if summary.overall is not None:
        top = "" if summary.top_third is None else f", {summary.top_third:.2f} in the top third"
        parts.append(f"reliability of quality {summary.overall:.2f} over {summary.candidates} candidates{top}")
    if summary.front_noise is not None:
        parts.append(f"{show_share(summary.front_noise)} of the front's members are there by noise")
    if summary.rescored:
        deviations = ((summary.stated_sd, "as stated before"), (summary.seen_sd, "by these seeds"))
        sds = ", ".join(f"{sd:.3f} {how}" for sd, how in deviations if sd is not None)
        parts.append(
            f"{summary.rescored} candidates re-scored on {summary.seeds} fresh seeds, standard deviation {sds}"
        )
    else:
        parts.append("not re-scored on fresh seeds")
    parts += [f"{group} does not count: {why}" for group, why in summary.left_out.items()]
    return "; ".join(parts)
