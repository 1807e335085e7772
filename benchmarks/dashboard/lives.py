"""Events and results of simulated trials, as an orchestrator would store them, step by step.

A trial has measurements on two devices, qualities on a ladder of three rungs, and the proposer's observations. Exports,
trainings and artifacts are left out: no list of trials reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from benchmarks.dashboard.candidates import DEVICES, RUNGS, Candidate, Judge
from nas.core.layout import Layout
from nas.core.trial import EventKind
from nas.search.proposers import Observation
from nas.search.proposers.sampling import Rng, Sampler
from nas.search.study.events import QualityKnown

_PROMOTED_ABOVE = (0.7, 0.75)
_FAILED, _CANCELLED = 0.010, 0.012
"""Shares of the trials, each on top of the one before."""


class Logged(NamedTuple):
    """An event of the trial."""

    kind: EventKind
    payload: dict[str, Any]


class Measurement(NamedTuple):
    """A measurement: the payload of its result."""

    device: str
    payload: dict[str, Any]


Step = Logged | Measurement


def new_layouts(sampler: Sampler, rng: Rng, ids: set[str]) -> Iterator[Layout]:
    """Yields layouts that are not in `ids`, each once."""
    while True:
        layout = sampler.draw(rng)
        if layout.id not in ids:
            ids.add(layout.id)
            yield layout


def life(judge: Judge, layout: Layout, rng: Rng, *, reference: bool = False) -> Iterator[Step]:
    """Yields the steps of a trial of the layout; a reference is always completed."""
    candidate = judge.candidate(layout, rng)
    luck = 1.0 if reference else rng.random()
    yield Logged(EventKind.EXPORTED, {})
    if luck < _CANCELLED:
        kind = EventKind.FAILED if luck < _FAILED else EventKind.CANCELLED
        yield Logged(kind, {"reason": "crash: the runner ended with status 139"})
        return
    yield Logged(EventKind.MEASURING, {})
    for device in DEVICES:
        yield Measurement(device, judge.measurement(candidate, device, rng))
        reason = None if reference else judge.broken(candidate, device)
        if reason is not None:
            yield Logged(EventKind.INFEASIBLE, {"reason": reason})
            yield _observation_event(Observation(layout, "infeasible"))
            return
    yield Logged(EventKind.GATED_IN, {})
    yield from _ladder(judge, candidate, rng, reference=reference)


def cut_short(steps: Iterator[Step], rng: Rng) -> Iterator[Step]:
    """Returns the first few of a trial's steps: it has not ended."""
    return (step for step, _ in zip(steps, range(int(rng.integers(8))), strict=False))


def rng_of(*what: int) -> Rng:
    """Returns a generator seeded by the arguments alone."""
    return np.random.default_rng([41, *what])


def _ladder(judge: Judge, candidate: Candidate, rng: Rng, *, reference: bool) -> Iterator[Step]:
    for rung, name in enumerate(RUNGS):
        yield Logged(EventKind.TRAINING, {"rung": rung})
        quality = judge.scored(candidate, rung, rng)
        yield Logged(EventKind.PROGRESS, QualityKnown(rung, quality).to_json())
        if not reference and rung < len(_PROMOTED_ABOVE) and quality.value < _PROMOTED_ABOVE[rung]:
            yield Logged(EventKind.STOPPED, {"reason": f"not promoted from rung {name}", "rung": rung})
            yield _observation_event(Observation(candidate.layout, "stopped", rung=rung))
            return
    yield Logged(EventKind.CONFIRMING, {})
    yield Logged(EventKind.COMPLETE, {})
    yield _observation_event(Observation(candidate.layout, "complete", rung=len(RUNGS) - 1))


def _observation_event(observation: Observation) -> Logged:
    return Logged(EventKind.PROGRESS, {"what": "told", "observation": observation.to_json()})
