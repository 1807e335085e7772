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
from nas.search.study.events import expectations

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
class HypervolumeCurve:
    """The growth of the front.

    Args:
        steps: in which the hypervolume grew.
        front: the trials on it now, by number.
        hypervolume: now; None without a reference point.
    """

    steps: Sequence[Step] = ()
    front: Sequence[int] = ()
    hypervolume: float | None = None


def hypervolume_curve(
    completions: Sequence[Completion], axes: TrialAxes, reference_point: Sequence[float] | None
) -> HypervolumeCurve:
    """Adds trials to the front in the order in which they became complete, with their present objectives.

    Args:
        completions: of the study; those without axes do not count.
        axes: of the complete trials that count.
        reference_point: the reference point; None until it is fixed.
    """
    if reference_point is None:
        return HypervolumeCurve()
    archive = FrontArchive(reference_point)
    counted = [completion for completion in completions if completion.trial in axes]
    trials = [completion.trial for completion in counted]
    gains = archive.take(trials, arrays(axes, trials)[0]) if trials else np.zeros(0)
    steps = [
        Step(completion.trial, count, completion.at, float(total))
        for count, (completion, gain, total) in enumerate(zip(counted, gains, np.cumsum(gains), strict=True), 1)
        if gain > 0
    ]
    return HypervolumeCurve(steps, sorted(archive.keys.tolist()), archive.hypervolume)


def interval(axes: TrialAxes, reference_point: Sequence[float], draws: int = VOLUME_DRAWS) -> Volume | None:
    """Returns the hypervolume with its 95 % interval; None if no noise can be drawn.

    Too many trials are near the front for that, or the noise of one of them is not known.
    """
    near = near_front(axes)
    draws = affordable_draws(draws, len(near))
    if not near or not draws:
        return None
    points, sd = arrays(axes, near)
    return None if np.isnan(sd).any() else volume(points, sd, reference_point, draws)


def history(completions: Sequence[Completion], axes: TrialAxes, reference_point: Sequence[float] | None) -> list[Json]:
    """Returns the hypervolume with its interval after each complete trial, or evenly spaced ones."""
    if reference_point is None:
        return []
    counted = [completion for completion in completions if completion.trial in axes]
    every = -(-len(counted) // _MOMENTS) or 1
    moments = []
    for count in range(len(counted), 0, -every):
        last, until_then = (
            counted[count - 1],
            {completion.trial: axes[completion.trial] for completion in counted[:count]},
        )
        values = interval_json(interval(until_then, reference_point, _DRAWS_OVER_TIME), until_then, reference_point)
        moments.append({"elapsed_s": last.elapsed_s, "trial": last.trial, "complete": count, **values})
    return moments[::-1]


def interval_json(volume: Volume | None, axes: TrialAxes, reference_point: Sequence[float]) -> Json:
    """Returns the report's form of `interval`."""
    if volume is None:
        return {"hypervolume": front_hypervolume(axes, reference_point), "estimate": None, "low": None, "high": None}
    return {"hypervolume": volume.value, "estimate": volume.estimate, "low": volume.low, "high": volume.high}


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


class ExpectedGain(BaseModel):
    """The expected gain of the last proposal."""

    hypervolume: float = Field(description="upper bound, for the whole batch of the proposal")
    batch: int
    share: float | None = Field(description="of the hypervolume at that time")


def expected_gain(log: StudyLog) -> ExpectedGain | None:
    """Returns the expected gain of the batch that the last proposal was part of."""
    expected = [batch for batch in expectations(log.notes).values() if batch.of_batch is not None]
    if not expected or (gain := expected[-1].of_batch) is None:
        return None
    last = expected[-1]
    return ExpectedGain(hypervolume=gain, batch=last.batch, share=gain / last.hypervolume if last.hypervolume else None)
