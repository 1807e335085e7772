"""How a running study stands: what displays show."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from nas.core.space import SearchSpace
from nas.service.ledger import Ledger
from nas.service.ranking import Ranked, rank_trials
from nas.service.scales import Scales
from nas.service.trial_run import TrialRun

_ENDED_TO_GUESS = 3


@dataclass(frozen=True, slots=True)
class FrontRow:
    """One trial of the front so far: its objectives' values, in the space's order."""

    trial: int
    layout: str
    values: tuple[float, ...]
    place: Ranked


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A study at one moment.

    Args:
        study: its name.
        states: state -> trials in it, references not counted.
        proposed: trials proposed so far, of `wanted`.
        active: what is being done now, a line each.
        hypervolume: None until the references have finished.
        front: best first.
        elapsed_s: of this process.
        left_s: a guess from the pace so far; None while there is none.
    """

    study: str
    states: Mapping[str, int]
    proposed: int
    wanted: int
    active: tuple[str, ...]
    objectives: tuple[str, ...]
    hypervolume: float | None
    front: tuple[FrontRow, ...]
    elapsed_s: float
    left_s: float | None


def snapshot(
    ledger: Ledger, space: SearchSpace, scales: Scales, runs: Mapping[int, TrialRun], wanted: int, begun: float
) -> Snapshot:
    """How the study stands now; `begun` is on the monotonic clock."""
    elapsed = time.monotonic() - begun
    own = [run for run in runs.values() if run.reference is None]
    ended = sum(run.ended for run in own)
    return Snapshot(
        study=ledger.study.name,
        states=dict(Counter(run.stage for run in own)),
        proposed=len(own),
        wanted=wanted,
        active=tuple(_line(run) for run in runs.values() if not run.ended and not run.waiting),
        objectives=tuple(objective.name for objective in space.objectives),
        hypervolume=scales.hypervolume,
        front=_front(scales, runs),
        elapsed_s=elapsed,
        left_s=elapsed / ended * (wanted - ended) if ended >= _ENDED_TO_GUESS else None,
    )


def _front(scales: Scales, runs: Mapping[int, TrialRun]) -> tuple[FrontRow, ...]:
    if scales.reference_point is None:
        return ()
    placed = rank_trials(scales.complete, scales.reference_point, draws=0)
    return tuple(
        FrontRow(
            place.trial,
            runs[place.trial].layout.format(),
            tuple(axis.value for axis in scales.complete[place.trial]),
            place,
        )
        for place in placed
        if place.rank == 0
    )


def _line(run: TrialRun) -> str:
    who = f"{run.reference} reference" if run.reference else f"trial {run.number}"
    return f"{who}: {run.stage}"
