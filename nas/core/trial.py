"""Trial states and events: the state machine that derives a trial's state from its events.

A trial's events are append-only; `derive` computes its state from them. Event kinds that change a state carry the
name of the state they lead to, except `retried`, which puts a trial that failed for a retryable reason back to
`proposed`: results are found by key, so nothing that was finished is done again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import reduce
from typing import Any

from nas.core.errors import InvalidInput


class TrialState(StrEnum):
    """State of a candidate in a study."""

    PROPOSED = "proposed"
    EXPORTED = "exported"
    MEASURING = "measuring"
    INFEASIBLE = "infeasible"
    BORDERLINE = "borderline"
    GATED_IN = "gated_in"
    TRAINING = "training"
    CONFIRMING = "confirming"
    COMPLETE = "complete"
    STOPPED = "stopped"
    FAILED = "failed"
    CANCELLED = "cancelled"


class EventKind(StrEnum):
    """Kinds of events. The first twelve are transitions to the state of the same name."""

    PROPOSED = "proposed"
    EXPORTED = "exported"
    MEASURING = "measuring"
    INFEASIBLE = "infeasible"
    BORDERLINE = "borderline"
    GATED_IN = "gated_in"
    TRAINING = "training"
    CONFIRMING = "confirming"
    COMPLETE = "complete"
    STOPPED = "stopped"
    FAILED = "failed"
    CANCELLED = "cancelled"
    RETRIED = "retried"
    PROGRESS = "progress"
    """Progress within a stage: a repetition, training steps, a rung's score. Changes no state."""
    STUDY = "study"
    """An event of the study as a whole: started, paused, reference point frozen, hypervolume. Has no trial."""


TERMINAL = frozenset(
    {TrialState.INFEASIBLE, TrialState.COMPLETE, TrialState.STOPPED, TrialState.FAILED, TrialState.CANCELLED}
)
"""Final states. `retried` leaves one (a retryable failure), and fresh seeds may show that a complete trial breaks a
budget on quality."""

_ABORT = frozenset({TrialState.FAILED, TrialState.CANCELLED})

TRANSITIONS: Mapping[TrialState, frozenset[TrialState]] = {
    TrialState.PROPOSED: _ABORT | {TrialState.EXPORTED},
    TrialState.EXPORTED: _ABORT | {TrialState.MEASURING, TrialState.INFEASIBLE},
    TrialState.MEASURING: _ABORT | {TrialState.INFEASIBLE, TrialState.BORDERLINE, TrialState.GATED_IN},
    TrialState.BORDERLINE: _ABORT | {TrialState.INFEASIBLE, TrialState.GATED_IN},
    TrialState.GATED_IN: _ABORT | {TrialState.TRAINING, TrialState.STOPPED},
    TrialState.TRAINING: _ABORT
    | {TrialState.TRAINING, TrialState.STOPPED, TrialState.CONFIRMING, TrialState.INFEASIBLE},
    TrialState.CONFIRMING: _ABORT | {TrialState.COMPLETE, TrialState.INFEASIBLE},
    **{state: frozenset() for state in TERMINAL},
    TrialState.COMPLETE: frozenset({TrialState.INFEASIBLE}),
}
"""State -> the states that may follow. `training` follows itself only at a higher rung."""


@dataclass(frozen=True, slots=True)
class Event:
    """One row of a study's append-only log.

    Args:
        kind: what happened.
        payload: JSON; transitions read `rung` (int), `reason` (str) and `retryable` (bool) from it.
        trial: the trial's number, or None for the study as a whole.
        study: id of the study.
        id: increases with every event of a study; 0 before it is stored.
        at: seconds since the epoch.
    """

    kind: EventKind
    payload: Mapping[str, Any] = field(default_factory=dict)
    trial: int | None = None
    study: int = 0
    id: int = 0
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class TrialStatus:
    """A derived state.

    Args:
        state: of the trial.
        rung: the highest rung it has entered; None before training.
        reason: why it was stopped, infeasible, failed or cancelled.
        retryable: a failure that `retried` may undo.
    """

    state: TrialState
    rung: int | None = None
    reason: str | None = None
    retryable: bool = False

    @property
    def terminal(self) -> bool:
        """Whether the state is final."""
        return self.state in TERMINAL


def advance(status: TrialStatus | None, event: Event) -> TrialStatus:
    """Returns the status after one more event; `status` None: the trial has no events yet.

    Raises:
        InvalidInput: the event is no legal continuation.
    """
    if event.kind is EventKind.RETRIED:
        if status is None or not status.retryable:
            raise _illegal(status, event)
        return TrialStatus(TrialState.PROPOSED)
    if event.kind is EventKind.PROGRESS:
        if status is None:
            raise _illegal(status, event)
        return status
    if event.kind is EventKind.STUDY:
        raise _illegal(status, event)
    return _transition(status, event)


def derive(events: Iterable[Event]) -> TrialStatus:
    """Returns the status that follows from a trial's events, in order; raises `InvalidInput` for no legal order."""
    status = reduce(advance, events, None)
    if status is None:
        raise InvalidInput("a trial has at least the event 'proposed'")
    return status


def _transition(status: TrialStatus | None, event: Event) -> TrialStatus:
    target = TrialState(event.kind)
    legal = TRANSITIONS[status.state] if status else {TrialState.PROPOSED}
    if target not in legal:
        raise _illegal(status, event)
    before = status.rung if status else None
    rung = event.payload.get("rung", before)
    if target is TrialState.TRAINING and (rung is None or (before is not None and rung <= before)):
        raise InvalidInput(f"training needs a rung above {before}, not {rung}")
    retryable = target is TrialState.FAILED and bool(event.payload.get("retryable", False))
    return TrialStatus(target, rung, event.payload.get("reason"), retryable)


def _illegal(status: TrialStatus | None, event: Event) -> InvalidInput:
    where = f"trial {event.trial}" if event.trial is not None else None
    if status is None:
        return InvalidInput(f"the first event of a trial is 'proposed', not {event.kind.value!r}", where=where)
    legal = ", ".join(sorted(TRANSITIONS[status.state])) or "retried" * status.retryable or "nothing"
    message = f"{status.state.value!r} cannot become {event.kind.value!r}; it can become: {legal}"
    return InvalidInput(message, where=where)
