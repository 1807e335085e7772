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


class QualityReliability(BaseModel):
    """The reliability of the qualities of the complete candidates, by the classical definition of test theory.

    It is 1 - noise variance / variance between candidates: the squared correlation of a quality with its expectation
    over seeds. 0 where noise explains all differences.
    """

    candidates: int = Field(description="complete ones that count for the front")
    overall: float | None = Field(description="of all of them; null for fewer than three")
    top_third: float | None = Field(description="of the third of highest quality; null for fewer than three in it")
    front_noise: float | None = Field(description="share of front membership that is noise: 1 - mean P(front) on it")
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


def _reliability(study: StudySnapshot) -> QualityReliability | None:
    members = [row.p_front for row in study.front if row.on]
    if not members:
        return None
    found = [study.records[trial] for trial in study.counted]
    qualities = sorted((each.quality.value, each.quality.sd) for each in found if each.quality is not None)
    top = qualities[-math.ceil(len(qualities) / 3) :]
    fresh = [each.rescored for each in found if each.rescored is not None]
    spread = paired_spread([each.per_seed for each in fresh]) if len(fresh) > 1 else None
    seeds, scale = len(fresh[0].per_seed) if fresh else 0, _top_scale(study)
    known = [chance for chance in members if chance is not None]
    result = QualityReliability(
        candidates=len(qualities),
        overall=reliability(*zip(*qualities, strict=True)) if qualities else None,
        top_third=reliability(*zip(*top, strict=True)) if top else None,
        front_noise=1 - fmean(known) if known else None,
        rescored=len(fresh),
        seeds=seeds,
        stated_sd=scale.sd_of(seeds) if scale is not None and seeds else None,
        seen_sd=spread.sd / math.sqrt(seeds) if spread is not None and spread.dof else None,
        left_out=_left_out(scale),
        text="",
    )
    return result.model_copy(update={"text": _text(result)})


def _top_scale(study: StudySnapshot) -> QualityScale | None:
    stored = (study.record.study.scales or {}).get("quality", {}).get(study.space.quality.rungs[-1].name)
    return None if stored is None else QualityScale.model_validate(stored)


def _left_out(scale: QualityScale | None) -> dict[str, str]:
    """Returns the groups that do not count; version 0.1.0 stored no reasons."""
    if scale is None:
        return {}
    below = f"the published reference scores less than {scale.minimum:g} above chance"
    return {group: scale.reasons.get(group, below) for group in sorted(scale.left_out)}


def _text(found: QualityReliability) -> str:
    parts = []
    if found.overall is not None:
        top = "" if found.top_third is None else f", {found.top_third:.2f} in the top third"
        parts.append(f"reliability of quality {found.overall:.2f} over {found.candidates} candidates{top}")
    if found.front_noise is not None:
        parts.append(f"{show_share(found.front_noise)} of front membership is noise")
    if found.rescored:
        told = ((found.stated_sd, "as stated before"), (found.seen_sd, "by these seeds"))
        sds = ", ".join(f"{sd:.3f} {how}" for sd, how in told if sd is not None)
        parts.append(f"{found.rescored} candidates re-scored on {found.seeds} fresh seeds, standard deviation {sds}")
    else:
        parts.append("not re-scored on fresh seeds")
    parts += [f"{group} does not count: {why}" for group, why in found.left_out.items()]
    return "; ".join(parts)
