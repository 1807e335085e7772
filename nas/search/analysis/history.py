"""The hypervolume of a study over time, its interval, the expected gain of the next batch, and why the study ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, Field

from nas.core.pareto import FrontArchive, TrialAxes, affordable_draws, arrays, front_hypervolume, near_front
from nas.core.units import show_figure, show_number
from nas.search.analysis.record import Completion, StudyLog
from nas.search.proposers import Volume, volume
from nas.search.study.events import ending, expectations

Json = dict[str, Any]

VOLUME_DRAWS = 400
_MOMENTS = 40
"""Moments of the history at most; the last one is always among them."""
_DRAWS_OVER_TIME = 100


class Step(NamedTuple):
    """A moment at which the hypervolume grew.

    Args:
        trial: that made it grow.
        complete: trials that counted by then, this one included.
        at: seconds since the epoch.
        hypervolume: from then on.
    """

    trial: int
    complete: int
    at: float
    hypervolume: float


@dataclass(frozen=True)
class Course:
    """The growth of the front.

    Args:
        steps: in which the hypervolume grew.
        front: the trials on it now, by number.
        hypervolume: now; None without a reference point.
    """

    steps: Sequence[Step] = ()
    front: Sequence[int] = ()
    hypervolume: float | None = None


def hypervolume_course(completions: Sequence[Completion], axes: TrialAxes, corner: Sequence[float] | None) -> Course:
    """Adds trials to the front in the order in which they became complete, with their present objectives.

    Args:
        completions: of the study; those without axes do not count.
        axes: of the complete trials that count.
        corner: the reference point; None until it is fixed.
    """
    if corner is None:
        return Course()
    archive = FrontArchive(corner)
    counted = [each for each in completions if each.trial in axes]
    trials = [each.trial for each in counted]
    gains = archive.take(trials, arrays(axes, trials)[0]) if trials else np.zeros(0)
    steps = [
        Step(each.trial, count, each.at, float(total))
        for count, (each, gain, total) in enumerate(zip(counted, gains, np.cumsum(gains), strict=True), 1)
        if gain > 0
    ]
    return Course(steps, sorted(archive.keys.tolist()), archive.hypervolume)


def interval(axes: TrialAxes, corner: Sequence[float], draws: int = VOLUME_DRAWS) -> Volume | None:
    """Returns the hypervolume with its 95 % interval; None if too many trials are near the front to draw noise.

    Args:
        axes: of the trials.
        corner: the reference point.
        draws: from the noise of the trials near the front.
    """
    near = near_front(axes)
    draws = affordable_draws(draws, len(near))
    return volume(*arrays(axes, near), corner, draws) if near and draws else None


def history(completions: Sequence[Completion], axes: TrialAxes, corner: Sequence[float] | None) -> list[Json]:
    """Returns the hypervolume with its interval after each complete trial, or evenly spaced ones."""
    if corner is None:
        return []
    counted = [each for each in completions if each.trial in axes]
    every = -(-len(counted) // _MOMENTS) or 1
    found = []
    for count in range(len(counted), 0, -every):
        last, some = counted[count - 1], {each.trial: axes[each.trial] for each in counted[:count]}
        values = interval_json(interval(some, corner, _DRAWS_OVER_TIME), some, corner)
        found.append({"elapsed_s": last.elapsed_s, "trial": last.trial, "complete": count, **values})
    return found[::-1]


def interval_json(found: Volume | None, axes: TrialAxes, corner: Sequence[float]) -> Json:
    """Returns the report's form of `interval`."""
    if found is None:
        return {"hypervolume": front_hypervolume(axes, corner), "estimate": None, "low": None, "high": None}
    return {"hypervolume": found.value, "estimate": found.estimate, "low": found.low, "high": found.high}


class VolumeView(BaseModel):
    """The hypervolume of the front."""

    value: float = Field(description="of the measured values")
    estimate: float | None = Field(description="without their noise; null if too many trials are on the front")
    low: float | None = Field(description="lower end of the 95 % interval of `estimate`")
    high: float | None

    @property
    def text(self) -> str:
        """The estimate with its interval and the measured value, such as '1.15 (1.13 to 1.17), 1.19 as measured'."""
        measured = show_number(self.value, self.low, self.high)
        if self.estimate is None:
            return f"{measured} as measured"
        return f"{show_figure(self.estimate, self.low, self.high)}, {measured} as measured"


def expected_gain(log: StudyLog) -> Json | None:
    """Returns the expected gain of the batch that the last proposal was part of."""
    found = [each for each in expectations(log.notes).values() if each.of_batch is not None]
    if not found:
        return None
    last = found[-1]
    share = last.of_batch / last.hypervolume if last.hypervolume and last.of_batch is not None else None
    return {"hypervolume": last.of_batch, "batch": last.batch, "share": share}


def ended(log: StudyLog) -> Json | None:
    """Returns why no more layouts are proposed."""
    return ending(log.notes)
