"""How a study went: hypervolume with its interval over time, what the next batch may add, and why it ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nas.core.scoring import Axis
from nas.core.trial import EventKind
from nas.search import volume
from nas.service.ending import ending, expectations
from nas.service.record import StudyRecord, elapsed

Json = dict[str, Any]

_MOMENTS = 40
"""Moments that hypervolume is told of at most; the last one is always among them."""
_DRAWS, _DRAWS_OVER_TIME = 400, 100


def course(record: StudyRecord, axes: Mapping[int, Sequence[Axis]]) -> Json:
    """The report's `hypervolume_ci95`, `history`, `expected_gain` and `ended`.

    Args:
        record: of the study.
        axes: of the complete trials that count.
    """
    history = _history(record, axes)
    return {
        "hypervolume_ci95": _interval(record, axes, list(axes), _DRAWS) if history else None,
        "history": history,
        "expected_gain": _expected_gain(record),
        "ended": ending(record.log),
    }


def _history(record: StudyRecord, axes: Mapping[int, Sequence[Axis]]) -> list[Json]:
    """After each of the complete trials, or of evenly many of them."""
    if record.reference_point is None:
        return []
    ends = [
        (index, event.trial)
        for index, event in enumerate(record.log)
        if event.kind is EventKind.COMPLETE and event.trial in axes
    ]
    every = -(-len(ends) // _MOMENTS) or 1
    found, seconds = [], elapsed(record.log)
    for count in range(len(ends), 0, -every):
        index, trial = ends[count - 1]
        trials = [number for _, number in ends[:count] if number is not None]
        told = _interval(record, axes, trials, _DRAWS_OVER_TIME)
        found.append({"elapsed_s": seconds[index], "trial": trial, "complete": count, **told})
    return found[::-1]


def _interval(record: StudyRecord, axes: Mapping[int, Sequence[Axis]], trials: Sequence[int], draws: int) -> Json:
    assert record.reference_point is not None
    rows = [axes[trial] for trial in trials]
    points = [[axis.coordinate for axis in row] for row in rows]
    found = volume(points, [[axis.sd for axis in row] for row in rows], record.reference_point, draws)
    return {"hypervolume": found.value, "low": found.low, "high": found.high}


def _expected_gain(record: StudyRecord) -> Json | None:
    """Of the batch that the last proposal was part of."""
    told = [each for each in expectations(record.log).values() if each.of_batch is not None]
    if not told:
        return None
    last = told[-1]
    share = last.of_batch / last.hypervolume if last.hypervolume and last.of_batch is not None else None
    return {"hypervolume": last.of_batch, "batch": last.batch, "share": share}
